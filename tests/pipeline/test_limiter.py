import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.limiter import LimiterConfig, RateLimiter


def limiter(*, batch_size=4, min_sequences=10, samples_per_insert: float | None = 2.0, band=None):
    return RateLimiter(
        LimiterConfig(
            batch_size=batch_size, min_sequences=min_sequences, samples_per_insert=samples_per_insert, band=band
        )
    )


def draw_all(limit, batch_size=4):
    batches = 0
    while not limit.waits_for(batch_size):
        limit.count_draw(batch_size)
        batches += 1
    return batches


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"band": 5.9}, r"band is 5\.9; allowed: 6 \(batch_size \+ samples_per_insert\)"),
        ({"samples_per_insert": 4.1}, r"band is 8; allowed: 8\.1"),
        ({"band": math.inf}, "finite"),
        ({"band": math.nan}, "band is nan"),
        ({"samples_per_insert": 0.0}, "samples_per_insert is 0"),
        ({"samples_per_insert": -1.0}, "samples_per_insert is -1"),
        ({"samples_per_insert": math.inf}, "samples_per_insert is inf"),
        ({"min_sequences": 0}, "min_sequences is 0; allowed: 1 or more"),
        ({"batch_size": 0}, "batch_size is 0; allowed: 1 or more"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_reason(settings, reason):
    with pytest.raises(ValueError, match=reason):
        limiter(**settings)


@pytest.mark.parametrize(
    "settings", [{}, {"band": 6.0}, {"samples_per_insert": None, "band": 0.0}, {"min_sequences": 1}]
)
def test_settings_that_can_work_are_taken(settings):
    limiter(**settings)


def test_a_capacity_below_the_minimum_is_refused():
    config = limiter().config
    config.refuse_capacity(10)
    with pytest.raises(ValueError, match="capacity is 9; allowed: 10"):
        config.refuse_capacity(9)


def test_a_batch_larger_than_configured_is_refused():
    with pytest.raises(ValueError, match="batch_size is 5; allowed: at most 4"):
        limiter().waits_for(5)


def test_the_counts_by_hand():
    limit = limiter()  # B 4, minimum 10, 2 samples per insert, band 8
    assert limit.sequences_allowed == 10 + 4
    limit.insert(9)
    assert limit.waits_for(4) == "sequences to start with: 9 of 10 are there"
    limit.insert(5)
    assert draw_all(limit) == 2  # The band; all 14 are prefill now.
    assert (limit.prefill, limit.samples, limit.sequences_allowed) == (14, 8, 14 + 8)
    assert limit.waits_for(4) == "2 new sequences (2 samples for each)"
    limit.insert(8)
    assert draw_all(limit) == 4
    assert (limit.samples, limit.sequences_allowed, limit.samples_per_insert) == (24, 14 + 16, 24 / 8)


@given(
    batch_size=st.integers(1, 70),
    ratio=st.floats(0.01, 50),
    slack=st.floats(0, 100),
    min_sequences=st.integers(1, 300),
    flush=st.integers(1, 64),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_neither_side_waits_for_ever_and_the_ratio_is_kept(*, batch_size, ratio, slack, min_sequences, flush, seed):
    """Learner and collectors take turns as chance has it; the collectors publish whole shards of ``flush``."""
    band = max(batch_size + ratio + slack, 2 * batch_size)
    limit = limiter(batch_size=batch_size, min_sequences=min_sequences, samples_per_insert=ratio, band=band)
    generator = np.random.default_rng(seed)
    for _ in range(400):
        learner_can = not limit.waits_for(batch_size)
        allowed = limit.sequences_allowed
        assert allowed is not None
        collector_can = limit.inserted < allowed
        assert learner_can or collector_can, "deadlock"
        if not learner_can and generator.random() < 0.1:
            limit.leave_alone()
            continue
        if learner_can and (not collector_can or generator.random() < 0.5):
            limit.count_draw(batch_size)
            expected = math.floor((limit.samples + band) / ratio) + limit.prefill
            assert limit.sequences_allowed == max(expected, min_sequences)
        else:
            limit.insert(flush)
        if limit.samples:
            owed = ratio * (limit.inserted - limit.prefill)
            assert owed - band - ratio * flush <= limit.samples <= owed + band


def test_a_learner_left_alone_uses_the_prefill_and_then_neither_side_has_to_catch_up():
    limit = limiter()  # B 4, minimum 10, 2 samples per insert, band 8
    assert not limit.leave_alone()  # Nothing has been drawn: the minimum has to be there first.
    limit.insert(30)
    assert draw_all(limit) == 2
    assert limit.leave_alone()
    assert not limit.leave_alone()
    limit.count_draw(4)
    restored = limiter()
    restored.restore(limit.state())
    limit.insert(1)
    for each in (limit, restored):
        assert each.prefill == 30 - 12 // 2  # 12 samples, for which 6 sequences were needed.
    assert limit.leave_alone()
    assert draw_all(limit) == (2 * (31 - 10) + 8 - 12) // 4
    limit.insert(1)
    assert limit.waits_for(4) == ""  # The 10 that were there at the start earn nothing, whatever happens.
    assert limit.sequences_allowed == 10 + (48 + 8) // 2


def test_without_a_ratio_there_is_nothing_to_use_up():
    limit = limiter(samples_per_insert=None)
    limit.insert(30)
    limit.count_draw(4)
    assert not limit.leave_alone()


def resumed(state, **settings):
    limit = limiter(**settings)
    limit.restore(state)
    return limit


def test_a_resume_does_not_burst():
    before = limiter()
    before.insert(20)
    draw_all(before)
    before.insert(6)
    before.count_draw(4)
    after = resumed(before.state())
    after.insert_before_start(1000)  # Collected while no learner ran.
    assert draw_all(after) == draw_all(before)
    assert after.sequences_allowed == before.sequences_allowed + 1000
    after.insert(2)
    before.insert(2)
    assert draw_all(after) == draw_all(before) == 1


def test_a_resume_before_the_first_draw_is_a_first_start():
    before = limiter()
    before.insert(7)
    after = resumed(before.state())
    assert after.waits_for(4) == "sequences to start with: 7 of 10 are there"
    after.insert_before_start(500)
    draw_all(after)
    assert after.prefill == 507


def test_samples_that_nobody_consumed_are_not_in_the_state():
    limit = limiter()
    limit.insert(20)
    draw_all(limit)
    assert limit.state(unconsumed=4)["samples"] == limit.samples - 4


@pytest.mark.parametrize("ratio", [0.5, 3.9, None])
def test_a_resume_under_another_ratio_does_not_burst_either(ratio):
    before = limiter(samples_per_insert=ratio)
    before.insert(100)
    if ratio is None:
        for _ in range(50):
            before.count_draw(4)
    else:
        for _ in range(60):
            draw_all(before)
            before.insert(10)
        draw_all(before)
    after = resumed(before.state(), samples_per_insert=2.0)
    assert draw_all(after) <= 2 * after.config.band_samples / 4
    allowed = after.sequences_allowed
    assert allowed is not None
    assert abs(allowed - after.inserted) <= 2 * after.config.band_samples / 2.0 + 1


def test_a_resume_under_a_larger_minimum_lets_the_collectors_reach_it():
    before = limiter()
    before.insert(10)
    draw_all(before)
    after = resumed(before.state(), min_sequences=500)
    assert after.sequences_allowed == 500


def test_without_a_ratio_only_the_minimum_counts():
    limit = limiter(samples_per_insert=None)
    assert limit.sequences_allowed is None
    assert limit.waits_for(4)
    limit.insert(10)
    for _ in range(100):
        assert not limit.waits_for(4)
        limit.count_draw(4)


def test_a_batch_taken_back_is_not_counted():
    limit = limiter()
    limit.insert(20)
    draw_all(limit)
    limit.take_back_draw(4)
    assert draw_all(limit) == 1


def test_a_first_draw_that_is_taken_back_or_never_consumed_was_none():
    limit = limiter()
    limit.insert(12)
    limit.count_draw(4)
    assert (limit.state(unconsumed=4)["has_drawn"], limit.state(unconsumed=4)["prefill"]) == (False, 10)
    limit.take_back_draw(4)
    limit.insert(30)
    limit.count_draw(4)
    assert limit.prefill == 42
