"""``--help`` explains every option, and says what it is when it is not given."""

import re

import pytest

from jobs import collect, evaluate, learn

OPTION = re.compile(r"(--[a-z][a-z-]*)")


def options(text: str) -> dict[str, str]:
    """Each option's explanation, out of boxes in one column."""
    lines = [re.sub(r"^[│| ]+|[│| ]+$", "", line) for line in text.splitlines()]
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        if re.match(r"[╭╰─+-]{2}(?!-?[a-z])", line):
            name = ""
        elif line.startswith("--"):
            name = OPTION.match(line).group(1)
            found[name] = re.sub(r"^--\S+(, --\S+)?( [A-Z{}|]\S*)?", "", line)
        elif name:
            found[name] += " " + line
    return found


@pytest.mark.parametrize("job", [learn, collect, evaluate])
def test_every_option_is_explained_and_has_its_default(tmp_path, monkeypatch, capsys, job):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stopped:
        job.main(["--help"])
    assert stopped.value.code == 0
    found = options(capsys.readouterr().out)
    assert len(found) > 15
    for name, text in found.items():
        assert re.search(r"\(default: .+\)|\(repeatable", text), (name, text)
        explained = re.sub(r"\((default|repeatable)[^)]*\)?", "", text)
        assert len(explained.split()) >= 3, (name, text)


def test_settings_of_the_algorithm_name_their_source(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        learn.main(["--help"])
    found = options(capsys.readouterr().out)
    for name in (
        "--gamma", "--rescaling", "--rescaling-epsilon", "--learning-rate", "--adam-epsilon", "--clip-norm", "--eta",
        "--beta", "--target-copy-updates", "--initial-state", "--initializer", "--initializer-width", "--tbptt",
        "--time-weighting", "--burn-in", "--unroll", "--bootstrap", "--stride", "--frame-stack", "--capacity",
        "--alpha", "--core", "--core-layers", "--core-width", "--publish-updates", "--publish-seconds",
        "--most-memory-share",
    ):  # fmt: skip
        assert re.search(r"paper|article|ours", found[name]), (name, found[name])
