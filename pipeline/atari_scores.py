"""What random play, a human and the paper's agent score at each Atari game (``atari_scores.csv`` names the source)."""

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("atari_scores.csv")


@dataclass(frozen=True, kw_only=True)
class GameScores:
    """Mean scores of whole games."""

    random: float
    human: float
    r2d2: float

    def human_normalised(self, score: float) -> float:
        """Percent: 0 is random play, 100 the human."""
        return 100 * (score - self.random) / (self.human - self.random)


def scores_of(env_id: str) -> GameScores | None:
    """Of ``ALE/MsPacman-v5`` and the like; None for what is no Atari game of the table."""
    game = re.fullmatch(r"ALE/(\w+)-v\d+", env_id)
    return _table().get(game[1].lower()) if game else None


@cache
def _table() -> dict[str, GameScores]:
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return {
        row["game"].replace("_", ""): GameScores(
            random=float(row["random"]), human=float(row["human"]), r2d2=float(row["r2d2"])
        )
        for row in csv.DictReader(lines)
    }
