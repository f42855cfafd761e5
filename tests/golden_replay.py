"""The golden replay: act with frozen weights, store, read back, and require what the actor saw (algorithm.md 10).

The log is taken from the policy's own outputs, step by step, and never passes through the builder.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from pipeline.dataset import agree_on_terms, list_collectors, shards_after
from pipeline.decode import BatchDecoder
from pipeline.environments import EnvironmentConfig, make_lanes
from pipeline.rollout import Rollout
from pipeline.sequences import SequenceBuilder
from pipeline.shard_reader import open_shard
from pipeline.shard_writer import ShardWriter, WriterConfig
from pipeline.store import LocalStore
from r2d2.burn_in import burn_in
from r2d2.config import LearnerConfig, NetworkSpec, is_image
from r2d2.exploration import epsilon_ladder
from r2d2.learner import Learner
from r2d2.networks import R2D2Network, build_network, state_from_rows
from r2d2.policy import RecurrentPolicy
from r2d2.priorities import initial_priorities
from r2d2.tensors import window_tensors
from schemas.geometry import CONTINUES, CUT, LIFE_LOST, TERMINATED, TRUNCATED, SequenceGeometry
from schemas.records import ReplaySample, SequenceBatch
from schemas.specs import CoreSpec
from schemas.terms import DatasetTerms

LINEAGE = bytes(range(100, 116))
SMALL_MAPS = ((4, 8, 8), (8, 3, 2))


@dataclass
class Acted:
    """What really happened: per (collector, episode) the policy's Q-values over its steps, and how it ended."""

    q: dict[tuple[str, int], list[np.ndarray]] = field(default_factory=dict)
    ends: dict[tuple[str, int], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """The identity of one stored sequence."""

    collector: str
    episode: int
    start: int
    initial_priority: float


@dataclass(frozen=True)
class Golden:
    """Everything one golden run made."""

    terms: DatasetTerms
    network: R2D2Network
    acted: Acted
    store: LocalStore
    rows: list[Row]
    batch: SequenceBatch


def golden_network(terms_env, core: CoreSpec, frame_stack: int, seed: int = 0) -> R2D2Network:
    spec = NetworkSpec(
        observation=terms_env.observation,
        num_actions=terms_env.num_actions,
        frame_stack=frame_stack,
        convolutions=SMALL_MAPS if is_image(terms_env.observation) else (),
        dense=(24,),
        core=core,
        dueling_width=16,
    )
    network = build_network(spec, torch.Generator().manual_seed(seed))
    with torch.no_grad():  # Large enough that a wrong state cannot hide below the tolerance.
        for parameter in network.parameters():
            parameter *= 2.0
    return network


def collect_golden(
    root: Path,
    *,
    environment: EnvironmentConfig,
    geometry: SequenceGeometry,
    core: CoreSpec,
    lanes: int = 1,
    calls: int = 100,
    collectors: int = 1,
    per_shard: int = 64,
    builder_class=SequenceBuilder,
    policy_class=RecurrentPolicy,
    priorities=initial_priorities,
) -> Golden:
    """Act ``calls`` vector steps per collector, stop in mid-episode, write shards, read every sequence back."""
    root.mkdir(exist_ok=True)
    store, acted = LocalStore(root), Acted()
    for number in range(collectors):
        vector = make_lanes(environment, lanes)
        terms = DatasetTerms(env=vector.spec, geometry=geometry, core=core)
        agree_on_terms(store, terms)
        network = golden_network(vector.spec, core, geometry.frame_stack)
        random = np.random.default_rng(number)
        policy = policy_class(core, vector.spec.num_actions, epsilon_ladder(lanes), random)
        policy.set_network(network, version=5, lineage=LINEAGE)
        name = f"collector{number}"
        builder = builder_class(terms, name, lanes)
        writer = ShardWriter(
            store, terms, name, WriterConfig(flush_sequences=per_shard, first_flush_seconds=1e9, flush_seconds=1e9),
            initial_priorities=lambda batch, q, terms=terms: priorities(
                batch, q, terms.geometry, LearnerConfig(), terms.env.life_loss
            ),
        )  # fmt: skip
        rollout = Rollout(vector, policy, geometry.frame_stack, seed=17 * number)
        open_episode: dict[int, int] = {}
        episodes = 0
        for _ in range(calls):
            step = rollout.step()
            for lane in np.flatnonzero(step.is_transition):
                if step.first[lane]:
                    open_episode[lane] = episodes
                    acted.q[name, episodes] = []
                    acted.ends[name, episodes] = CUT
                    episodes += 1
                episode = name, open_episode[lane]
                acted.q[episode].append(step.act.q_values[lane])
                if step.terminated[lane]:
                    acted.ends[episode] = TERMINATED
                elif step.life_lost[lane] and environment.life_loss == "reset":
                    acted.ends[episode] = LIFE_LOST
                elif step.truncated[lane]:
                    acted.ends[episode] = TRUNCATED
            for sequence in builder.record(step):
                writer.add(sequence)
                writer.maybe_flush()
        observation, act = rollout.look()
        for sequence in builder.cut(observation, act.q_values):
            writer.add(sequence)
        writer.flush()
        vector.close()
    rows, batch = read_back(store, terms)
    return Golden(terms, network, acted, store, rows, batch)


def read_back(store: LocalStore, terms: DatasetTerms) -> tuple[list[Row], SequenceBatch]:
    """Every sequence of the dataset through the decoder that the learner uses."""
    rows, identities = [], []
    for collector in list_collectors(store):
        for name in shards_after(store, collector, -1):
            shard = open_shard(store.map_path(name.path), name)
            columns = shard.columns
            for row in range(shard.num_rows):
                rows.append((shard, row))
                identities.append(
                    Row(
                        collector,
                        int(columns["episode"][row]),
                        int(columns["start"][row]),
                        float(columns["initial_priority"][row]),
                    )
                )
    with BatchDecoder(terms) as decoder:
        batch, ok = decoder.decode(rows)
    assert ok.all()
    return identities, batch


def check_q_at_every_valid_row(golden: Golden) -> None:
    """From the stored state, one sequence at a time over all its real rows: the actor's own numbers to 1e-5."""
    geometry, network, batch = golden.terms.geometry, golden.network, golden.batch
    depth = geometry.frame_stack
    for b, row in enumerate(golden.rows):
        first, steps = int(batch.first_valid[b]), int(batch.num_steps[b])
        frames = torch.from_numpy(batch.observation[b])
        stacks = torch.stack([frames[t : t + depth] for t in range(first, first + steps)])
        actions = np.concatenate([[batch.previous_action[b]], batch.action[b, first : first + steps - 1]])
        rewards = np.concatenate([[batch.previous_reward[b]], batch.reward[b, first : first + steps - 1]])
        start = state_from_rows(tuple(torch.from_numpy(part[b : b + 1]) for part in batch.core), golden.terms.core)
        with torch.no_grad():
            q, _ = network.unroll(
                network.encode(stacks)[:, None],
                torch.from_numpy(actions).long()[:, None],
                torch.from_numpy(rewards.astype(np.float32))[:, None],
                start,
            )
        first_step = row.start - geometry.burn_in + first
        logged = golden.acted.q[row.collector, row.episode][first_step : first_step + steps]
        np.testing.assert_allclose(q[:, 0].numpy(), np.stack(logged), atol=1e-5, rtol=1e-5, err_msg=str(row))


def check_learner_q(golden: Golden, window: SequenceGeometry, life_loss: str = "off") -> None:
    """The learner's own path over a (cropped) window: burn-in over the whole batch, then the trained rows."""
    stored, network = golden.terms.geometry, golden.network
    tensors = window_tensors(
        golden.batch,
        window,
        stored,
        core=golden.terms.core,
        num_actions=golden.terms.env.num_actions,
        life_loss=life_loss,
        device=torch.device("cpu"),
    )
    length = window.burn_in
    with torch.no_grad():
        features = network.encode(tensors.stack(0, length + window.unroll)).transpose(0, 1)
        state = burn_in(network, features[:length], tensors, tensors.core)
        rows = (length, length + window.unroll)
        q, _ = network.unroll(features[length:], *tensors.previous(*rows), state)
    assert tensors.core_known.all()
    replayed, logged = [], []
    for b, row in enumerate(golden.rows):
        (trained,) = np.nonzero(tensors.transitions.mask[:, b].numpy())
        replayed.append(q[trained, b].numpy())
        acted = golden.acted.q[row.collector, row.episode]
        logged += [acted[row.start + t] for t in trained]
    assert len(logged) >= len(golden.rows)
    np.testing.assert_allclose(np.concatenate(replayed), np.stack(logged), atol=1e-5, rtol=1e-5)


def check_coverage(golden: Golden) -> None:
    """Every environment step is trained the number of times that algorithm.md section 1 says, and owned once."""
    geometry, batch = golden.terms.geometry, golden.batch
    tensors = window_tensors(
        batch,
        geometry,
        geometry,
        core=golden.terms.core,
        num_actions=golden.terms.env.num_actions,
        life_loss=golden.terms.env.life_loss,
        device=torch.device("cpu"),
    )
    trained: dict[tuple[str, int], Counter] = {}
    for b, row in enumerate(golden.rows):
        rows = np.flatnonzero(tensors.transitions.mask[:, b].numpy())
        trained.setdefault((row.collector, row.episode), Counter()).update((row.start + rows).tolist())
    assert trained.keys() == golden.acted.q.keys()
    for episode, counts in trained.items():
        steps = len(golden.acted.q[episode])
        assert counts == {step: geometry.times_trained(step, steps) for step in range(steps)}, episode
    owned = geometry.owned_steps(batch.first_valid, batch.num_steps, batch.ends)
    assert owned.sum() == sum(len(steps) for steps in golden.acted.q.values())


def check_ends(golden: Golden) -> None:
    """A window that holds its episode's end says how it ended; the others say that it continues."""
    geometry = golden.terms.geometry
    for b, row in enumerate(golden.rows):
        episode = row.collector, row.episode
        past_last_row = row.start + geometry.unroll + geometry.bootstrap
        steps, ends = len(golden.acted.q[episode]), golden.acted.ends[episode]
        # A window that was just full when the collector stopped had been written before anything was cut.
        holds_end = steps < past_last_row or (steps == past_last_row and ends != CUT)
        assert golden.batch.ends[b] == (ends if holds_end else CONTINUES), row


def check_priorities(golden: Golden) -> None:
    """The actor's initial priorities are what the learner finds with the same weights as online and target network."""
    learner = Learner(
        golden.network.spec,
        LearnerConfig(learning_rate=1e-30),
        geometry=golden.terms.geometry,
        stored=golden.terms.geometry,
        life_loss=golden.terms.env.life_loss,
        lineage=LINEAGE,
    )
    for network in (learner.network, learner.target):
        network.load_state_dict(golden.network.state_dict())
    count = len(golden.rows)
    sample = ReplaySample(
        ids=np.arange(count),
        probabilities=np.full(count, 1 / count),
        replay_sequences=count,
        batch=golden.batch,
    )
    found = learner.step(sample).priorities
    stored = np.array([row.initial_priority for row in golden.rows])
    assert np.isfinite(stored).all()
    np.testing.assert_allclose(stored, found, atol=1e-4, rtol=1e-4)


def check_all(golden: Golden) -> None:
    check_q_at_every_valid_row(golden)
    check_learner_q(golden, golden.terms.geometry, golden.terms.env.life_loss)
    check_coverage(golden)
    check_ends(golden)
    check_priorities(golden)
