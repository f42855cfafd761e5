"""The acting side of a dataset's terms: a policy that takes up published parameters and prices new sequences."""

from collections.abc import Sequence as Many
from pathlib import Path

import numpy as np

from jobs.console import warn
from jobs.ladder import lanes_of_groups
from jobs.parameters import read_parameters, refuse_misfit
from r2d2.config import LearnerConfig
from r2d2.policy import RecurrentPolicy
from r2d2.priorities import initial_priorities
from r2d2.serialize import Parameters, network_of, params_from_bytes
from schemas.records import SequenceBatch
from schemas.terms import DatasetTerms

EVALUATION_EPSILON = 0.001  # Kapturowski et al. 2019, appendix.


class ActingPolicy:
    """Acts uniformly at random until it is given parameters.

    Args:
        learner: prices new sequences while no parameters have come that say how their learner does.
        groups: lanes of each group that acts by itself; together they span the ladder.
        ladder: ``OFFSET:TOTAL``, or None for a ladder of these lanes alone.

    Attributes:
        policies: one per group, for its ``Rollout``.
        evaluation_policy: of ``evaluation_lanes`` lanes that act at epsilon 0.001.
        version: of the parameters in use, -1 while there are none.
    """

    def __init__(
        self,
        terms: DatasetTerms,
        learner: LearnerConfig,
        groups: Many[int],
        ladder: str | None,
        generator: np.random.Generator,
        device: str,
        evaluation_lanes: int = 0,
    ) -> None:
        self.terms = terms
        self.version = -1
        self._learner, self._device = learner, device
        self.policies = [
            RecurrentPolicy(terms.core, terms.env.num_actions, rungs, own_generator, device)
            for rungs, own_generator in lanes_of_groups(groups, ladder, generator)
        ]

        self.evaluation_policy = RecurrentPolicy(
            terms.core,
            terms.env.num_actions,
            np.full(evaluation_lanes, EVALUATION_EPSILON),
            generator.spawn(1)[0],
            device,
        )

    @property
    def waits_for(self) -> str:
        return "" if self.version >= 0 else "a learner's parameters, acts at random meanwhile"

    def metrics(self) -> dict[str, float]:
        """Nothing to tell beside the version."""
        return {}

    def use_published(self, data: bytes) -> None:
        """Act with these parameters from now on. Damaged bytes are named and left; the ones in use stay.

        Raises:
            ValueError: a network that does not fit the dataset: actions, observation, frame stack or core.
        """
        try:
            params = params_from_bytes(data)
        except ValueError as error:
            warn(f"parameters are not used: {error}")
            return
        self._use(params)

    def use_file(self, path: Path) -> None:
        """Act with the parameters in a file from now on. Raises ValueError when they cannot be used."""
        self._use(read_parameters(path, "params"))

    def _use(self, params: Parameters) -> None:
        spec = params.spec
        refuse_misfit(spec, self.terms.env)
        if spec.core != self.terms.core:
            raise ValueError(f"core of the network is {spec.core}; allowed: {self.terms.core}, the dataset's")
        if spec.frame_stack > self.terms.geometry.frame_stack:
            raise ValueError(
                f"frame_stack of the network is {spec.frame_stack}; allowed: at most "
                f"{self.terms.geometry.frame_stack}, the dataset's"
            )
        if params.acting is not None:
            self._learner = self._learner.with_acting_values(params.acting)
        network = network_of(params)
        for policy in (*self.policies, self.evaluation_policy):
            policy.set_network(network, params.version, params.lineage)
        self.version = params.version

    def initial_priorities(self, batch: SequenceBatch, q_values: np.ndarray) -> np.ndarray:
        """For a ``ShardWriter``: float32 ``[B]``, NaN where no network acted."""
        return initial_priorities(batch, q_values, self.terms.geometry, self._learner, self.terms.env.life_loss)
