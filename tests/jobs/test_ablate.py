"""The claims: every experiment runs, verdicts follow the rules, results are kept and never run twice."""

import json

import numpy as np
import pytest
import torch

from jobs import ablate
from jobs.claims.catalogue import CLAIMS, conditions
from jobs.claims.document import write_document
from jobs.claims.measures import MEASURES
from jobs.claims.peak import SavedBytes
from jobs.claims.results import Cell, Results
from jobs.claims.tasks import TASKS
from jobs.claims.variants import VARIANTS
from jobs.claims.verdicts import (
    HELD,
    REFUTED,
    UNTESTED,
    Harmless,
    Loses,
    Measured,
    Spread,
    bootstrap,
    loss_share,
    overall,
)
from jobs.flags import TrackingFlags
from pipeline.tracking import NullTracker

PROVENANCE = {"commit": "0123456789", "machine": "Linux, 2 cores"}


def cell(experiment, variant, seed, score=0.0, **values):
    looks = [[100, 1000, score], [200, 2000, score]]
    return Cell(experiment=experiment, variant=variant, seed=seed, values=values, looks=looks, provenance=PROVENANCE)


def results_with(folder, **scores):
    results = Results(folder)
    for variant, values in scores.items():
        for seed, value in enumerate(values):
            results.add(cell("task", variant, seed, value))
    return results


NOISE = np.array([-0.02, -0.01, 0.0, 0.01, 0.02])


@pytest.mark.parametrize(
    ("part", "condition", "verdict"),
    [
        (Loses(task="task", condition="b", control="a"), 0.5 + NOISE, HELD),
        (Loses(task="task", condition="b", control="a", least=0.4), 0.5 + NOISE, HELD),
        (Loses(task="task", condition="b", control="a", least=0.8), 0.5 + NOISE, REFUTED),
        (Loses(task="task", condition="b", control="a"), 1.0 + NOISE, REFUTED),
        (Loses(task="task", condition="b", control="a", least=0.22), 1.3 + NOISE, REFUTED),
        (Loses(task="task", condition="b", control="a"), 0.9 + 10 * NOISE, UNTESTED),
        (Loses(task="task", condition="b", control="a"), 0.5 + NOISE[:4], UNTESTED),
        (Harmless(task="task", condition="b", control="a"), 1.0 + NOISE, HELD),
        (Harmless(task="task", condition="b", control="a"), 1.5 + NOISE, HELD),
        (Harmless(task="task", condition="b", control="a"), 0.5 + NOISE, REFUTED),
        (Harmless(task="task", condition="b", control="a"), 1.0 + 10 * NOISE, UNTESTED),
        (Spread(task="task", condition="b", control="a"), 1.0 + 20 * NOISE, HELD),
        (Spread(task="task", condition="b", control="a"), 1.0 + NOISE / 20, REFUTED),
    ],
)
def test_a_verdict_follows_the_rule_that_was_fixed_beforehand(part, condition, verdict, tmp_path):
    results = results_with(tmp_path, a=1.0 + NOISE, b=condition)
    assert part.judge(results).verdict == verdict


@pytest.mark.parametrize(
    ("values", "verdict"), [((0.5, 0.6), HELD), ((0.1, 0.2), REFUTED), ((0.1, 0.6), UNTESTED), ((), UNTESTED)]
)
def test_a_measured_figure_is_judged_by_where_its_interval_lies(values, verdict, tmp_path):
    results = Results(tmp_path)
    for seed, value in enumerate(values):
        results.add(cell("measurement", "", seed, share=value))
    assert Measured(measurement="measurement", figure="share", least=0.4).judge(results).verdict == verdict


def test_a_claim_holds_when_all_its_parts_do_and_falls_with_any():
    def findings(*verdicts):
        return [type("Found", (), {"verdict": verdict}) for verdict in verdicts]

    assert overall(findings(HELD, HELD)) == HELD
    assert overall(findings(HELD, UNTESTED)) == UNTESTED
    assert overall(findings(HELD, UNTESTED, REFUTED)) == REFUTED


def test_every_claim_names_experiments_that_exist():
    assert list(CLAIMS) == [f"C{n}" for n in range(1, 24)]
    for claim in CLAIMS.values():
        for experiment, variant in (pair for part in claim.parts for pair in conditions(part)):
            assert (experiment in MEASURES and not variant) or (experiment in TASKS and variant in VARIANTS)


def test_against_a_control_that_came_to_nothing_an_interval_may_be_endless_but_is_one():
    never, sometimes = np.zeros(5), np.array([0.0, 0.0, 0.0, 2.0, 3.0])
    assert loss_share(never[None], sometimes[None]).tolist() == [-np.inf]
    assert loss_share(never[None], never[None]).tolist() == [0.0]
    lost = bootstrap(loss_share, sometimes, sometimes)
    assert (lost.mean, lost.low) == (0.0, -np.inf)
    assert 0 < lost.high <= 1


def test_results_come_back_as_they_were_written_and_a_foreign_file_is_named(tmp_path):
    written = cell("task", "segments, cut", 3, 0.5, updates=0.25)
    seen_before = Results(tmp_path)
    assert not seen_before.has("task", "segments, cut", 3)
    assert Results(tmp_path).add(written).name == "task-segments-cut-3.json"
    assert Results(tmp_path).of("task", "segments, cut") == [written]
    assert seen_before.has("task", "segments, cut", 3)  # Another process has written it since.
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json is no result of this job"):
        Results(tmp_path)


def test_bytes_kept_for_the_backward_pass_are_counted_and_forgotten():
    weight = torch.ones(1000, requires_grad=True)
    with SavedBytes() as saved:
        (weight.exp() * 2.0).sum().backward()
        first = saved.most
        for _ in range(5):
            (weight.exp() * 2.0).sum().backward()
    assert first == saved.most == 4000


def test_what_is_there_is_not_run_again_and_the_document_says_what_is_missing(tmp_path, monkeypatch, capsys):
    results = Results(tmp_path / "results")
    for seed in range(5):
        results.add(cell("discount", "", seed, **{"0.997^1000": 0.0496}))
    monkeypatch.setattr(ablate, "run_cell", lambda *_, **__: pytest.fail("it has been run"))
    assert ablate.main(["--claim", "C8", "--results", str(results.folder), "--tracking-uri", "none"]) == 0
    assert "held" in capsys.readouterr().out
    text = write_document(results, tmp_path / "docs").read_text()
    assert "| C8 | 0.997^1000 is 0.05. | **held** | 0.997^1000: 0.0496 [0.0496, 0.0496]: *held* |" in text
    assert "short-recall, terminal step dropped: 0 of 5 seeds have been run" in text


@pytest.mark.parametrize(
    ("flags", "reason"), [(["--claim", "C24"], "claim is 'C24'; allowed: C1, C2"), (["--seeds", "0"], "seeds is 0")]
)
def test_wrong_flags_are_one_line(flags, reason, capsys):
    with pytest.raises(SystemExit) as stopped:
        ablate.main(flags)
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err


def test_quick_runs_every_experiment_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert ablate.main(["--quick", "--tracking-uri", "none"]) == 0
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().out
    pairs = {pair for claim in CLAIMS.values() for part in claim.parts for pair in conditions(part)}
    assert f"{len(pairs)}/{len(pairs)}  " in said


def test_a_result_says_where_it_comes_from(tmp_path):
    assert ablate.main(["--claim", "C8", "--seeds", "1", "--results", str(tmp_path), "--tracking-uri", "none"]) == 0
    record = json.loads((tmp_path / "discount-0.json").read_text())
    assert {"command", "commit", "machine", "versions", "started_unix_seconds"} <= record["provenance"].keys()


def test_a_sweeps_name_and_parent_reach_every_run(monkeypatch):
    made = []
    monkeypatch.setattr(ablate, "make_tracker", lambda config: made.append(config) or NullTracker())
    ablate._log(cell("pong", "", 3), TrackingFlags(run_name="night", parent_run_id="p"), [])
    ((name, parent),) = [(config.run_name, config.parent_run_id) for config in made]
    assert (name, parent) == ("night pong 3", "p")
