"""How jobs end: at Ctrl-C while they are imported, at one signal, at a second one."""

import ast
import os
import signal
import subprocess
import sys

import pytest

from jobs import stopping
from jobs.demo import OWN_SECONDS, Job, end_all
from jobs.stopping import FORCED_STATUS, StopRequest
from tests.processes import ROOT

JOBS = sorted(path.name for path in (ROOT / "jobs").glob("*.py") if "\nif __name__" in path.read_text())
INTERRUPT = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
IMPORTED = f"try:\n    {INTERRUPT.strip().replace(chr(10), '; ')}\nexcept BaseException:\n    pass\n"
RUNNING = f"def main():\n    try:\n        exec({INTERRUPT!r})\n    finally:\n        print('closed')\n\nmain()\n"


@pytest.mark.parametrize("job", JOBS)
def test_every_job_can_be_interrupted_from_its_first_import_on(job):
    tree = ast.parse((ROOT / "jobs" / job).read_text())
    first = next(node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    assert ast.unparse(first) == "import jobs.interrupt"


@pytest.mark.parametrize(("code", "status"), [(IMPORTED, 130), (RUNNING, -2)], ids=["imported", "running"])
def test_ctrl_c_is_one_line_and_no_traceback(tmp_path, code, status):
    script = tmp_path / "jobs" / "job.py"
    script.parent.mkdir()
    script.write_text(f"import jobs.interrupt\n{code}")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (status, "stopped\n")
    assert ("closed" in done.stdout) == (status == -2)


@pytest.fixture
def clock(monkeypatch):
    """Time that stands still, and the statuses that the process would have ended with."""
    now, ended = [100.0], []
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stopping.os, "_exit", ended.append)
    return now, ended


def test_one_signal_delivered_several_times_is_one_and_a_later_one_ends_at_once(clock):
    now, ended = clock
    stop = StopRequest()
    stop._on_signal(signal.SIGINT, None)
    now[0] += 0.4
    stop._on_signal(signal.SIGTERM, None)
    assert (stop.reason, ended) == ("SIGINT", [])
    now[0] += 0.2
    stop._on_signal(signal.SIGINT, None)
    assert ended == [FORCED_STATUS]


def test_a_demos_jobs_may_end_by_themselves_after_ctrl_c_and_are_told_after_other_signals(monkeypatch):
    told = []
    monkeypatch.setattr(Job, "__init__", lambda job: None)
    monkeypatch.setattr(Job, "end", lambda job, own_seconds: told.append(own_seconds))
    for number in (signal.SIGINT, signal.SIGTERM):
        stop = StopRequest()
        stop._on_signal(number, None)
        end_all([Job()], stop)  # type: ignore[call-arg]
    assert told == [OWN_SECONDS, 0]
