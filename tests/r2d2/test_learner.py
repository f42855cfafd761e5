"""The learner over many updates: reproducible, resumable, its target copied on time, its options told apart."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from r2d2.networks import build_network
from r2d2.serialize import params_from_bytes, params_to_bytes, tensors_from_bytes, tensors_to_bytes
from schemas.geometry import CUT, TERMINATED, TRUNCATED
from schemas.specs import CoreSpec
from tests.r2d2.conftest import GEOMETRY
from tests.r2d2.episodes import LINEAGE, cut, join, play, sample_of, with_garbage


@pytest.fixture(scope="module")
def samples(vector_spec):
    """Twenty different samples of experience under the learner's lineage."""
    network = build_network(vector_spec, torch.Generator().manual_seed(1))
    episodes = [(3, TERMINATED), (9, TRUNCATED), (14, CUT), (22, TERMINATED)]
    return [
        sample_of(join([cut(play(network, e, ends, 7 * s + e), GEOMETRY)[0] for e, ends in episodes]), seed=s)
        for s in range(20)
    ]


def trace(learner, samples) -> list[float]:
    return [learner.step(sample).metrics["loss"] for sample in samples]


def parameters(network) -> torch.Tensor:
    return torch.cat([value.detach().flatten().clone() for value in network.parameters()])


@pytest.mark.parametrize("options", [{}, {"initial_state": "initializer", "tbptt": 3}], ids=str)
def test_two_traces_of_20_updates_with_one_seed_are_bit_equal(make_learner, samples, options):
    before = torch.random.get_rng_state()
    one, other = make_learner(seed=3, **options), make_learner(seed=3, **options)
    assert trace(one, samples) == trace(other, samples)
    assert torch.equal(parameters(one.network), parameters(other.network))
    assert trace(make_learner(seed=4, **options), samples) != trace(make_learner(seed=3, **options), samples)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_updates_reduce_the_error_on_what_is_replayed(make_learner, samples):
    learner = make_learner(learning_rate=1e-2, adam_epsilon=1e-8)
    errors = [learner.step(samples[0]).metrics["td_error_abs_mean"] for _ in range(60)]
    assert errors[-1] < 0.5 * errors[0]


def test_garbage_in_padding_changes_nothing_h_a3(make_learner, samples):
    clean, spoilt = make_learner(), make_learner()
    for sample in samples[:5]:
        outputs = clean.step(sample), spoilt.step(replace(sample, batch=with_garbage(sample.batch, GEOMETRY)))
        assert outputs[0].metrics == outputs[1].metrics
        np.testing.assert_array_equal(outputs[0].priorities, outputs[1].priorities)
    assert torch.equal(parameters(clean.network), parameters(spoilt.network))


@pytest.mark.parametrize("options", [{}, {"initial_state": "initializer"}], ids=str)
def test_a_restored_learner_goes_on_bit_equal(make_learner, image_spec, vector_spec, samples, options):
    """Through bytes, in the middle between two target copies, with convolutions in channels-last order."""
    network = build_network(image_spec, torch.Generator().manual_seed(1))
    images = [sample_of(cut(play(network, 9 + s, CUT, s), GEOMETRY)[0], seed=s) for s in range(9)]
    for spec, data in ((image_spec, images), (vector_spec, samples[:9])):
        original = make_learner(spec=spec, target_copy_updates=3, **options)
        trace(original, data[:4])
        saved = tensors_to_bytes(*original.state())
        resumed = make_learner(spec=spec, target_copy_updates=3, seed=8, lineage=bytes(16), **options)
        resumed.restore(*tensors_from_bytes(saved))
        assert (resumed.updates, resumed.version, resumed.lineage) == (4, 4, LINEAGE)
        assert trace(resumed, data[4:]) == trace(original, data[4:])
        assert torch.equal(parameters(resumed.target), parameters(original.target))
        assert tensors_to_bytes(*resumed.state()) == tensors_to_bytes(*original.state())


def test_a_state_that_does_not_fit_is_refused_by_name(make_learner, vector_spec, samples):
    learner = make_learner()
    trace(learner, samples[:1])
    tensors, values = learner.state()
    other = make_learner(spec=replace(vector_spec, num_actions=4))
    with pytest.raises(ValueError, match="num_actions is 4, not 3; allowed: that of the saved state"):
        other.restore(tensors, values)
    with pytest.raises(ValueError, match="no updates"):
        learner.restore(tensors, {k: v for k, v in values.items() if k != "updates"})
    for name in ("target.value.bias", "adam.exp_avg.network.value.bias"):
        with pytest.raises(ValueError, match=r"value\.bias is missing"):
            make_learner().restore({k: v for k, v in tensors.items() if k != name}, values)
    with pytest.raises(ValueError, match=r"initializer: .* is missing"):
        make_learner(initial_state="initializer").restore(tensors, values)


def test_the_target_is_copied_every_period_and_bit_identical_between_h_g2(make_learner, samples):
    learner = make_learner(target_copy_updates=3, learning_rate=1e-2)
    copied = []
    for update in range(1, 13):
        before = parameters(learner.target)
        learner.step(samples[update])
        if torch.equal(parameters(learner.target), parameters(learner.network)):
            copied.append(update)
        else:
            assert torch.equal(parameters(learner.target), before)
    assert copied == [3, 6, 9, 12]


def test_reloading_never_changes_the_period_nor_its_phase_h_g2(make_learner, samples):
    """Stop at 3,700 of period 2,500, four reloads: the next copy is at 5,000."""
    tensors, values = make_learner().state()
    for _ in range(4):
        learner = make_learner()
        learner.restore(tensors, {**values, "updates": 3700, "version": 3700})
        assert learner.config.target_copy_updates == 2500
        tensors, values = learner.state()
    assert values["updates"] == 3700
    for updates, copies in ((4998, False), (4999, True), (6199, False)):
        learner = make_learner(learning_rate=1e-2)
        learner.restore(tensors, {**values, "updates": updates, "version": updates})
        learner.step(samples[0])
        assert torch.equal(parameters(learner.target), parameters(learner.network)) == copies, updates


def test_a_period_of_501_copies_ten_times_in_5010_updates_h_g2(make_learner, samples):
    """The counter is walked, not the arithmetic: only updates next to a multiple are run."""
    copies = []
    learner = make_learner(target_copy_updates=501, learning_rate=1e-2)
    for update in range(1, 5011):
        if (update + 1) % 501 > 2:
            learner.updates += 1
            continue
        learner.step(samples[update % 20])
        if torch.equal(parameters(learner.target), parameters(learner.network)):
            copies.append(update)
    assert copies == [501 * k for k in range(1, 11)]


@pytest.mark.parametrize("spoilt", ["reward", "parameter"])
def test_a_loss_that_is_not_finite_touches_nothing(make_learner, samples, spoilt):
    learner, control = make_learner(), make_learner()
    trace(learner, samples[:2])
    trace(control, samples[:2])
    if spoilt == "reward":
        reward = samples[2].batch.reward.copy()
        reward[1, GEOMETRY.burn_in] = np.inf
        output = learner.step(replace(samples[2], batch=replace(samples[2].batch, reward=reward)))
    else:
        bias = learner.network.value.bias
        kept = bias.detach().clone()
        bias.data.fill_(torch.nan)
        output = learner.step(samples[2])
        bias.data.copy_(kept)
    assert not output.updated
    assert not np.isfinite(output.priorities).all()
    assert learner.updates == 2
    assert trace(learner, samples[3:6]) == trace(control, samples[3:6])


def test_foreign_states_and_parameter_lag_are_measured(make_learner, samples):
    batch = samples[0].batch
    lineage = batch.lineage.copy()
    lineage[:3] = 0
    version = np.arange(len(batch))
    mixed = replace(samples[0], batch=replace(batch, lineage=lineage, version_last=version))
    learner = make_learner()
    learner.updates = 100
    metrics = learner.step(mixed).metrics
    assert metrics["foreign_state_share"] == pytest.approx(3 / len(batch))
    assert metrics["parameter_lag_updates"] == pytest.approx(100 - version[3:].mean())
    foreign = make_learner(lineage=bytes([7] * 16)).step(samples[0]).metrics
    assert foreign["foreign_state_share"] == 1.0
    assert not {"parameter_lag_updates", "dq_first", "dq_last"} & foreign.keys()
    trusting = make_learner(lineage=bytes([7] * 16), trust_stored_state=True).step(samples[0]).metrics
    assert {"dq_first", "dq_last"} <= trusting.keys()


def test_states_of_another_core_are_not_used(make_learner, vector_spec, samples):
    learner = make_learner(spec=replace(vector_spec, core=CoreSpec(kind="gru", width=5)), trust_stored_state=True)
    assert not learner.usable_states(samples[0].batch).any()
    assert learner.step(samples[0]).updated


@pytest.mark.parametrize(
    "options",
    [
        {"eta": 0.2},
        {"beta": 0.1},
        {"importance_weights": False},
        {"gamma": 0.9},
        {"rescaling": False},
        {"time_weighting": "recent"},
        {"tbptt": 3, "tbptt_carry": False},
        {"initial_state": "zero"},
        {"initial_state": "initializer"},
    ],
    ids=str,
)
def test_each_option_changes_what_it_must_and_nothing_else(make_learner, samples, options):
    """Priorities do not know weights; the loss does not know eta; the initial parameters know none of it."""
    base, other = make_learner(), make_learner(**options)
    assert torch.equal(parameters(base.network), parameters(other.network))
    one, two = base.step(samples[0]), other.step(samples[0])
    name = next(iter(options))
    weighs = name in ("beta", "importance_weights", "time_weighting")
    assert np.array_equal(one.priorities, two.priorities) == weighs
    assert (one.metrics["loss"] == two.metrics["loss"]) == (name == "eta")
    assert torch.equal(parameters(base.network), parameters(other.network)) == (name == "eta")


def test_tbptt_with_a_carried_state_changes_gradients_only(make_learner, samples):
    base, other = make_learner(), make_learner(tbptt=3)
    one, two = base.step(samples[0]), other.step(samples[0])
    np.testing.assert_allclose(one.priorities, two.priorities, atol=1e-6)
    assert one.metrics["gradient_norm"] != pytest.approx(two.metrics["gradient_norm"], rel=1e-3)


def test_gradients_are_clipped_to_the_norm(make_learner, samples):
    learner = make_learner(clip_norm=1e-3)
    norm = learner.step(samples[0]).metrics["gradient_norm"]
    clipped = torch.cat([parameter.grad.flatten() for parameter in learner.network.parameters()]).norm()
    assert norm > 1e-3
    assert clipped.item() == pytest.approx(1e-3, rel=1e-3)


def test_bfloat16_networks_keep_float32_parameters_and_about_the_same_priorities(make_learner, samples):
    full, half = make_learner().step(samples[0]), make_learner(precision="bfloat16").step(samples[0])
    assert half.updated
    np.testing.assert_allclose(half.priorities, full.priorities, rtol=0.1, atol=0.02)
    assert not np.array_equal(half.priorities, full.priorities)


def test_a_learner_starts_from_published_parameters_and_counts_versions_on(make_learner, vector_spec, samples):
    teacher = make_learner(lineage=bytes([9] * 16))
    trace(teacher, samples[:3])
    published = params_from_bytes(params_to_bytes(teacher.network, teacher.version, teacher.lineage))
    learner = make_learner(seed=5)
    learner.start_from(published)
    assert torch.equal(parameters(learner.network), parameters(teacher.network))
    assert torch.equal(parameters(learner.target), parameters(teacher.network))
    assert (learner.lineage, learner.updates, learner.version) == (teacher.lineage, 0, 3)
    learner.step(samples[3])
    assert (learner.updates, learner.version) == (1, 4)
    with pytest.raises(ValueError, match="num_actions"):
        make_learner(spec=replace(vector_spec, num_actions=4)).start_from(published)


def test_a_new_learner_has_a_lineage_of_its_own(make_learner):
    lineages = {make_learner(lineage=None).lineage for _ in range(3)}
    assert len(lineages) == 3
    assert all(len(lineage) == 16 for lineage in lineages)


def test_what_a_smaller_window_leaves_out_is_said_and_measured(make_learner, samples):
    used = replace(GEOMETRY, burn_in=2, unroll=4)
    learner = make_learner(geometry=used)
    assert [notice.split(":")[0] for notice in learner.notices] == [
        "burn_in 2 of the stored 4",
        "unroll 4 of the stored 8",
    ]
    batch = samples[0].batch
    owned = GEOMETRY.owned_steps(batch.first_valid, batch.num_steps, batch.ends)
    share = learner.step(samples[0]).metrics["untrained_step_share"]
    assert share == pytest.approx(sum(max(0, steps - 4) for steps in owned) / sum(owned))
    assert make_learner().notices == ()
    assert "untrained_step_share" not in make_learner().step(samples[0]).metrics


def test_windows_and_modes_that_cannot_be_are_refused(make_learner):
    with pytest.raises(ValueError, match="burn_in is 5; allowed: at most 4"):
        make_learner(geometry=replace(GEOMETRY, burn_in=5))
    with pytest.raises(ValueError, match="life_loss is 'often'"):
        make_learner(life_loss="often")
    with pytest.raises(ValueError, match="tbptt is 9"):
        make_learner(tbptt=9)
