"""What a job tells of its troubles: once per appearance, counted for as long as they last."""

from jobs.health import HealthLog, memory_troubles, used_memory_share
from r2d2.health import MemoryLimit, Trouble


def test_a_trouble_is_told_when_it_appears_and_counted_while_it_lasts(capsys):
    log, trouble = HealthLog(("stuck", "hot")), Trouble("stuck", "nothing moves: nobody pushes")
    for report in ([], [trouble], [trouble], [], [trouble]):
        log.tell(report)
    said = capsys.readouterr().err.splitlines()
    assert said == ["warning: health: nothing moves: nobody pushes"] * 2
    assert log.metrics() == {"health/stuck": 3, "health/hot": 0}


def test_memory_in_use_leaves_out_what_the_kernel_can_give_back(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 600\n")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    800 kB\nHugePages_Total:       0\n")
    assert used_memory_share(tmp_path, meminfo) == 0.3
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(used_memory_share(tmp_path, meminfo) - 0.2) < 1e-9
    assert used_memory_share(tmp_path / "none", tmp_path / "none") is None


def test_this_machine_has_a_share_or_says_nothing():
    share = used_memory_share()
    assert share is None or 0 < share < 1
    assert memory_troubles(MemoryLimit(most_memory_share=1.0)) == []
