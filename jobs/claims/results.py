"""One file a run in ``results/``: written by the job, read by the document. Nothing is ever run twice."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "results"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run, or one repetition of a measurement.

    Attributes:
        experiment: the task's or the measurement's name.
        variant: what was changed; empty for measurements.
        seed: of everything random in it.
        values: what came out, by name.
        looks: the learning curve, ``[updates, env_steps, score]`` each.
        provenance: command, commit, machine, versions, time.
    """

    experiment: str
    variant: str
    seed: int
    values: dict[str, float]
    looks: list[list[float]]
    provenance: dict[str, Any]

    @property
    def path(self) -> str:
        return file_name(self.experiment, self.variant, self.seed)


def file_name(experiment: str, variant: str, seed: int) -> str:
    words = re.sub(r"[^a-z0-9.]+", "-", f"{experiment} {variant}".lower()).strip("-")
    return f"{words}-{seed}.json"


class Results:
    """The cells in one folder."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self._cells: dict[tuple[str, str, int], Cell] = {}
        for path in sorted(folder.glob("*.json")):
            self._load(path)

    def has(self, experiment: str, variant: str, seed: int) -> bool:
        """Also what another process has written since: several of them share the work."""
        path = self.folder / file_name(experiment, variant, seed)
        if (experiment, variant, seed) not in self._cells and path.exists():
            self._load(path)
        return (experiment, variant, seed) in self._cells

    def _load(self, path: Path) -> None:
        try:
            cell = Cell(**json.loads(path.read_bytes()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is no result of this job: {error}") from error
        self._cells[cell.experiment, cell.variant, cell.seed] = cell

    def add(self, cell: Cell) -> Path:
        """Write one cell; whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / cell.path
        unfinished = path.with_suffix(".writing")
        unfinished.write_text(json.dumps(asdict(cell), indent=1, sort_keys=True) + "\n")
        unfinished.replace(path)
        self._cells[cell.experiment, cell.variant, cell.seed] = cell
        return path

    def of(self, experiment: str, variant: str = "") -> list[Cell]:
        """All seeds of one condition, in order."""
        found = [cell for (name, which, _), cell in self._cells.items() if (name, which) == (experiment, variant)]
        return sorted(found, key=lambda cell: cell.seed)
