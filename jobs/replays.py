"""Which replay a learner draws from: one in process, one mixed of several datasets, or a service's."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jobs.command_line import Repeatable
from jobs.console import StatusLine
from jobs.stopping import StopRequest
from pipeline.dataset import read_terms
from pipeline.decode import BatchDecoder
from pipeline.flight import ServiceConnection, check_address
from pipeline.holdings import ReplayConfig
from pipeline.limiter import LimiterConfig
from pipeline.mixed_replay import MixedReplay, Share, refuse_other_terms, refuse_shares
from pipeline.parts import WHOLE, Part
from pipeline.replay import Replay
from pipeline.replay_client import RemoteReplay, describe
from pipeline.replay_messages import Description
from pipeline.replay_security import ClientSecurity, read_file, read_token
from pipeline.several_replays import SeveralReplays
from pipeline.store import Store, open_store
from schemas.terms import DatasetTerms

WAIT_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class MixFlags:
    """Further datasets in the same replay.

    Attributes:
        mix: ``URI=0.25``, repeatable: a quarter of every batch comes from the dataset URI; ``URI=0.5:0.1@100000``: its
            share falls from a half to a tenth over 100,000 updates. The rest is ``--dataset``'s, which alone counts for
            ``--samples-per-insert``. Terms must be the same.
    """

    mix: Repeatable = ()

    def __post_init__(self) -> None:
        refuse_shares(self.shares())

    def shares(self) -> list[Share]:
        return [Share.parse(text) for text in self.mix]


@dataclass(frozen=True, kw_only=True)
class ServiceFlags:
    """A replay elsewhere.

    Attributes:
        replay: ``grpc://host:port`` of a serve_replay.py to draw from, instead of a replay in this process;
            ``grpc+tls://`` when it has a certificate. Repeatable: the parts of one dataset, drawn from as one replay.
        token_file: file with the token that it wants; default: ``R2D2_REPLAY_TOKEN`` of the environment.
        tls_ca: PEM file of the authority that signed its certificate, or that certificate; default: the system's.
    """

    replay: Repeatable = ()
    token_file: Path | None = None
    tls_ca: Path | None = None

    def __post_init__(self) -> None:
        for address in self.replay:
            check_address(address)

    def security(self) -> ClientSecurity:
        """Raises ValueError when a file cannot be read."""
        authority = None if self.tls_ca is None else read_file(self.tls_ca, "tls_ca")
        return ClientSecurity(token=read_token(self.token_file), authority=authority)


def make_replay(
    store: Store,
    terms: DatasetTerms,
    config: ReplayConfig,
    limiter: LimiterConfig,
    *,
    shares: Sequence[Share] = (),
    seed: int,
    threads: int = 1,
    part: Part = WHOLE,
) -> Replay | MixedReplay:
    """A replay in this process, mixed when there are ``shares``.

    Raises:
        ValueError: a dataset to be mixed in is missing, or has other terms.
    """
    main = Replay(store, terms, config, limiter, generator=np.random.default_rng(seed), threads=threads, part=part)
    if not shares:
        return main
    others = {}
    # A share that is nothing in some batch may be a whole batch's in none: the limiter of a fixed dataset never waits.
    without_ratio = LimiterConfig(batch_size=limiter.batch_size, min_sequences=1, samples_per_insert=None)
    for number, share in enumerate(shares, start=1):
        other = open_store(share.uri, flag="mix")
        if other.uri == store.uri:
            raise ValueError(f"mix is {share.uri}; allowed: other datasets than the one that is trained on")
        refuse_other_terms(share.uri, read_terms(other), terms)
        generator = np.random.default_rng([seed, number])
        others[share] = Replay(other, terms, config, without_ratio, generator=generator)
    return MixedReplay(main, others, terms, threads=threads)


class FoundService(NamedTuple):
    """A replay service that has answered."""

    connection: ServiceConnection
    description: Description

    def replay(self, *, batch_size: int, threads: int) -> RemoteReplay:
        """Raises ValueError when the service gives no batches so large."""
        largest = self.description.largest_batch
        if batch_size > largest:
            raise ValueError(f"batch_size is {batch_size}; allowed: at most {largest}, which the replay service gives")
        return RemoteReplay(self.connection, self.description, threads=threads)

    def refuse_other_dataset(self, terms: DatasetTerms | None, uri: str) -> None:
        """Raise ValueError unless the dataset here, which takes the parameters, is the service's."""
        if terms is None:
            raise ValueError(f"dataset is {uri}; allowed: where this machine sees the dataset of the replay service")
        differences = terms.differences(self.description.terms)
        if differences:
            raise ValueError(f"dataset is {uri}; allowed: that of the replay service ({'; '.join(differences)})")


def refuse_parts(services: Sequence[FoundService]) -> None:
    """Raise ValueError unless the services are all parts of one run's, each once."""
    first, parts = services[0].description, [each.description.part for each in services]
    for each in services:
        for field in ("run", "dataset"):
            if (theirs := getattr(each.description, field)) != getattr(first, field):
                raise ValueError(
                    f"{field} of the replay service at {each.connection.address} is {theirs}; "
                    f"allowed: {getattr(first, field)}, as of the one at {services[0].connection.address}"
                )
    needed = [str(Part(index=i, total=len(services))) for i in range(len(services))]
    if sorted(parts) != sorted(needed):
        raise ValueError(f"replay names the parts {', '.join(parts)}; allowed: {', '.join(needed)}, each once")


def replay_of(
    services: Sequence[FoundService], *, batch_size: int, threads: int, seed: int
) -> RemoteReplay | SeveralReplays:
    """Raises ValueError when a service gives no batches so large."""
    if len(services) == 1:
        return services[0].replay(batch_size=batch_size, threads=threads)
    members = [service.replay(batch_size=batch_size, threads=1) for service in services]
    decoder = BatchDecoder(services[0].description.terms, threads)
    return SeveralReplays(members, decoder, generator=np.random.default_rng(seed))


def find_services(
    flags: ServiceFlags, stop: StopRequest, status: StatusLine, max_minutes: float | None = None
) -> list[FoundService]:
    """Wait for all services; none when the job was stopped, or its time was up, before they were there.

    Raises:
        ValueError: they are not the parts of one run's, or what answers is no replay service of ours.
    """
    found = []
    for address in flags.replay:
        service = find_service(address, flags.security(), stop, status, max_minutes)
        if service is None:
            return []
        found.append(service)
    refuse_parts(found)
    return found


def find_service(
    address: str, security: ClientSecurity, stop: StopRequest, status: StatusLine, max_minutes: float | None = None
) -> FoundService | None:
    """Wait for the service at ``address``; None when the job was stopped, or its time was up, before there was one.

    Raises:
        ValueError: what answers there is no replay service of ours.
    """
    connection = ServiceConnection(address, security)
    deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    while (description := describe(connection)) is None:
        status.show(waits_for=f"the replay service at {address}; start it with python jobs/serve_replay.py")
        if stop.wait(WAIT_SECONDS) or (deadline is not None and time.monotonic() >= deadline):
            return None
    return FoundService(connection, description)
