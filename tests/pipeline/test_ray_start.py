"""What keeps Ray from starting is found out before (case H-e1)."""

import os
import signal
import sys

import pytest

from pipeline.ray_start import LEAST_STORE_BYTES, LONGEST_FOLDER, plan_ray, start_ray

MIB = 2**20


def folder_of(length: int) -> str:
    return "/" + "t" * (length - 1)


def test_h_e1_a_folder_of_43_bytes_is_taken_as_it_is():
    plan = plan_ray(folder_of(43), 10**10)
    assert (plan.folder, plan.warnings) == (None, ())


@pytest.mark.parametrize("length", [44, 80])
def test_h_e1_a_longer_folder_is_replaced_by_a_short_one_and_said(length):
    plan = plan_ray(folder_of(length), 10**10)
    assert len(os.fsencode(plan.folder)) <= LONGEST_FOLDER
    assert os.path.isdir(plan.folder)
    assert plan.warnings == (
        f"TMPDIR makes Ray's folder {length} bytes long, its sockets allow 43: it uses {plan.folder}",
    )
    os.rmdir(plan.folder)


def test_h_e1_the_length_is_counted_in_bytes():
    plan = plan_ray("/" + "ü" * 22, 10**10)
    assert plan.folder is not None
    os.rmdir(plan.folder)


def test_h_e1_a_small_shared_memory_gives_an_explicit_store_and_a_warning():
    plan = plan_ray("/tmp/ray", 67_108_864)
    assert plan.store_bytes == LEAST_STORE_BYTES > 75 * MIB
    assert plan.warnings[0].startswith("/dev/shm has 64 MiB free: Ray keeps its object store of 80 MiB on the disk")


def test_h_e1_the_store_takes_at_most_half_of_the_shared_memory():
    assert plan_ray("/tmp/ray", 10**10).store_bytes == 500_000_000
    assert plan_ray("/tmp/ray", 400 * MIB).store_bytes == 200 * MIB
    assert plan_ray("/tmp/ray", 400 * MIB).warnings == ()


def test_h_e1_rays_own_choice_of_a_folder_is_followed(monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", folder_of(50))
    plan = plan_ray(shared_bytes=10**10)
    assert "54 bytes long" in plan.warnings[0]
    os.rmdir(plan.folder)
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    assert plan_ray(shared_bytes=10**10).folder is None


@pytest.mark.filterwarnings("ignore")
def test_the_jobs_own_answer_to_sigterm_holds_while_ray_starts_and_afterwards(monkeypatch):
    import ray

    def start(**_):
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # As Ray does.
        signal.raise_signal(signal.SIGTERM)

    answers = []
    before = signal.signal(signal.SIGTERM, lambda number, _: answers.append(number))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", start)
    try:
        with pytest.raises(SystemExit):
            start_ray()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert answers == [signal.SIGTERM] * 2
