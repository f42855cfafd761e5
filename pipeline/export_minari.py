"""Episodes as a Minari dataset (Farama's format for offline learning), lossless.

Conventions, also in the dataset's description:

* An episode of E steps has E + 1 observations, the final one among them, and E actions. ``rewards[t]``,
  ``terminations[t]`` and ``truncations[t]`` are what ``actions[t]`` brought.
* ``terminations`` is set in the last step where the learner bootstraps nothing: the episode terminated, or a life was
  lost where lives end episodes. ``truncations`` is set in the last step of every other episode, whether a time limit
  truncated it or the collector stopped (cut): bootstrap from the final observation. The episode's metadata say in
  ``ends`` which it was.
* Observations are single frames, never stacked, raw and not JPEG. The K-1 frames before an episode's first are zeros,
  but after a lost life: those are not exported.
* ``infos`` holds ``life_lost``, ``greedy`` and ``epsilon``; row t + 1 belongs to action t, row 0 (the reset's) is 0.
"""

import json
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.episodes import Episode
from schemas.geometry import ENDS_NAMES, LIFE_LOST, TERMINATED
from schemas.specs import EnvSpec
from schemas.terms import DatasetTerms

INFOS = ("life_lost", "greedy", "epsilon")
FACTS = ("collector", "number", "lane", "episode_return", "version_first", "version_last", "env_steps")


def write_minari(folder: Path, terms: DatasetTerms, episodes: Iterable[Episode]) -> tuple[int, int]:
    """The dataset whose id is the name of ``folder`` (``pong-v0``); (episodes, steps) written.

    ``MINARI_DATASETS_PATH`` set to the folder above lets ``minari.load_dataset`` find it. It appears when it is whole.
    Memory: one episode, and a few numbers of each.

    Raises:
        ValueError: the folder holds something already, or its name is no id; Minari is not installed.
    """
    try:
        import minari
        from minari.data_collector import EpisodeBuffer
        from minari.dataset.minari_dataset import parse_dataset_id
        from minari.dataset.minari_storage import MinariStorage
    except ImportError as error:
        raise ValueError(
            f"format is 'minari'; allowed: once it is installed, pip install 'minari[hdf5]' ({error})"
        ) from None
    try:
        parse_dataset_id(folder.name)
    except (ValueError, TypeError):
        raise ValueError(f"out is {str(folder)!r}; allowed: a folder named like a Minari dataset, NAME-v0") from None
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"out is {str(folder)!r}; allowed: a new or an empty folder")
    facts: list[dict[str, Any]] = []

    def buffers() -> Iterator[EpisodeBuffer]:
        for episode in episodes:
            facts.append({name: getattr(episode.facts, name) for name in FACTS})
            facts[-1] |= {"ends": ENDS_NAMES[episode.facts.ends], "lineage": episode.facts.lineage.hex()}
            yield EpisodeBuffer(**_arrays(episode), infos=_infos(episode))

    temporary = folder.absolute() / "_data"  # Minari takes a relative path twice.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It misses an author and an e-mail address.
            observation, action = _spaces(terms.env)
            storage = MinariStorage.new(
                temporary, observation_space=observation, action_space=action, data_format="hdf5", jpeg_encoding=False
            )
            described = {"dataset_id": folder.name, "minari_version": minari.__version__}
            described["description"] = f"{__doc__}\n\n{json.dumps(terms.env.to_json())}"
            storage.update_metadata(described)
            storage.update_episodes(buffers())
            storage.update_episode_metadata(facts, range(len(facts)))
            steps = storage.total_steps
        temporary.rename(folder / "data")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return len(facts), steps


def _spaces(env: EnvSpec) -> tuple[Any, Any]:
    """Gymnasium's spaces of observations and actions."""
    from gymnasium.spaces import Box, Discrete

    shape, dtype = env.observation.shape, np.dtype(env.observation.dtype)
    low, high = (0, 255) if dtype == np.uint8 else (-np.inf, np.inf)
    return Box(low, high, shape, dtype.type), Discrete(env.num_actions)


def _arrays(episode: Episode) -> dict[str, Any]:
    steps, ends = episode.facts.steps, episode.facts.ends
    is_last = np.arange(steps) == steps - 1
    is_over = ends in (TERMINATED, LIFE_LOST)
    return {
        "observations": episode.frames[len(episode.frames) - steps - 1 :],
        "actions": episode.action.astype(np.int64),
        "rewards": episode.reward,
        "terminations": is_last & is_over,
        "truncations": is_last & (not is_over),
    }


def _infos(episode: Episode) -> dict[str, np.ndarray]:
    of_actions = {name: getattr(episode, name) for name in INFOS}
    return {name: np.concatenate([np.zeros(1, values.dtype), values]) for name, values in of_actions.items()}
