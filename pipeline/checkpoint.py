"""Checkpoints: folders of blobs that appear whole or not at all, the newest complete one wins.

    <folder>/000001200/learner.safetensors, replay.safetensors, state.json, manifest.json

The manifest holds size and xxh3 of every other file. A folder without a fitting manifest is not a checkpoint.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import xxhash

MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """A checkpoint that was asked for cannot be used; the message names the path and the reason."""


@dataclass(frozen=True)
class Checkpoint:
    """``updates`` and the blobs that were saved under it."""

    path: Path
    updates: int
    blobs: dict[str, bytes]


class CheckpointFolder:
    """Keeps the newest ``keep`` (at least 2) checkpoints of one run on a local disk."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        if keep < 2:
            raise ValueError(f"keep is {keep}; allowed: 2 or more, so that the previous one is always there")
        self._folder, self._keep = folder, keep
        self._damaged: set[Path] = set()  # Found so by ``load_newest``.

    def save(self, updates: int, blobs: dict[str, bytes]) -> Path:
        """Durable when the call returns; a kill at any moment leaves the earlier ones as they were.

        Checkpoints older than the newest ``keep`` are deleted afterwards; those that ``load_newest`` found damaged do
        not count, whatever their number, and one of this name is replaced. OSError (a full disk, say) leaves no
        checkpoint of this name.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path, building = self._folder / f"{updates:09d}", self._folder / f"_{updates:09d}"
        self._clear_leftovers()
        if path.exists() and path not in self._damaged:  # Saved before, or what was loaded: as good.
            return path
        try:
            building.mkdir()
            manifest = {}
            for name, data in blobs.items():
                _write_durably(building / name, data)
                manifest[name] = {"bytes": len(data), "xxh3_64": xxhash.xxh3_64_hexdigest(data)}
            _write_durably(building / MANIFEST, json.dumps({"updates": updates, "files": manifest}).encode())
            _sync_folder(building)
            if path in self._damaged:
                shutil.rmtree(path)
                self._damaged.discard(path)
            building.rename(path)
            _sync_folder(self._folder)
        except OSError:
            shutil.rmtree(building, ignore_errors=True)
            raise
        oldest_kept = [each for each in self.paths() if each not in self._damaged][-self._keep :][0]
        for old in self.paths():
            if old < oldest_kept:
                shutil.rmtree(old, ignore_errors=True)
        return path

    def paths(self) -> list[Path]:
        """Oldest first, by name; whether they are complete shows when they are loaded."""
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if path.name.isdigit())

    def load_newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest complete checkpoint, and a line for each newer one that had to be passed over."""
        passed_over = []
        for path in reversed(self.paths()):
            try:
                return load_checkpoint(path), passed_over
            except CheckpointError as error:
                self._damaged.add(path)
                passed_over.append(str(error))
        return None, passed_over

    def _clear_leftovers(self) -> None:
        for leftover in self._folder.glob("_*"):
            shutil.rmtree(leftover, ignore_errors=True)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint.

    Raises:
        CheckpointError: it is missing, cut short, or a file differs from its manifest.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        blobs = {name: (path / name).read_bytes() for name in manifest["files"]}
        updates = int(manifest["updates"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} is not complete: {error}") from error
    for name, data in blobs.items():
        if xxhash.xxh3_64_hexdigest(data) != manifest["files"][name]["xxh3_64"]:
            raise CheckpointError(f"checkpoint {path} is damaged: {name} differs from its manifest")
    return Checkpoint(path, updates, blobs)


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
