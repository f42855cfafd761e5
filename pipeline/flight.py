"""The messages of a replay service over Arrow Flight. pyarrow.flight is imported only when a service is used."""

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa

from pipeline.replay_messages import LARGEST_REQUEST_BYTES, DrawRequest, FromClient, UpdateRequest
from pipeline.replay_security import ClientSecurity, ServerSecurity
from pipeline.replay_service import ReplayService

LOOPBACK = "127.0.0.1"
CALL_SECONDS = 4.0  # A service that says nothing for so long counts as away; the job stays within its ten seconds.
SAY_SECONDS = 5.0
RECONNECT_MILLISECONDS = 500
SCHEME, TLS_SCHEME = "grpc", "grpc+tls"

OPEN, NO_TOKEN = ServerSecurity(), ClientSecurity()

_log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class ServiceLost(Exception):
    """No answer: the service is not there, has died, or hangs. Trying again later is right."""


def serve(service: ReplayService, host: str, port: int, security: ServerSecurity = OPEN) -> Any:
    """Listen on ``host``, ``port`` (0: any free one); the server's ``port`` says which, ``shutdown()`` ends it.

    Requests are served by threads of Flight's own from now on. Wrong ones are refused with one line, those of somebody
    without the token with two words.

    Raises:
        ValueError: the port cannot be listened on, or other machines could reach it without a token.
    """
    security.refuse_open_host(host)
    from pyarrow import flight

    class Guard(flight.ServerMiddlewareFactory):
        """Asked before any method below is."""

        def start_call(self, info: Any, headers: dict[str, list[Any]]) -> None:
            if not security.accepts(headers):
                raise flight.FlightUnauthenticatedError("not allowed")

    class Server(flight.FlightServerBase):
        def do_get(self, context: Any, ticket: Any) -> Any:
            batch = _refusing(lambda: service.draw(DrawRequest.from_bytes(ticket.ticket)))
            return flight.RecordBatchStream(pa.RecordBatchReader.from_batches(batch.schema, [batch]))

        def do_action(self, context: Any, action: Any) -> Any:
            return [flight.Result(_refusing(lambda: _act(service, action.type, action.body)))]

        def _refuse_method(self, *_: Any) -> Any:
            raise flight.FlightServerError("a replay service has no such method; allowed: DoGet, DoAction")

        do_put = do_exchange = list_flights = get_flight_info = list_actions = _refuse_method

    def _refusing(answer: Callable[[], Answer]) -> Answer:
        try:
            return answer()
        except (ValueError, OSError) as error:  # Of any other kind pyarrow would show the client our traceback.
            raise flight.FlightServerError(_one_line(error)) from None

    _refuse_taken_port(host, port)
    certificates = [(security.certificate, security.key)] if security.tls else None
    try:
        address = f"{TLS_SCHEME if security.tls else SCHEME}://{host}:{port}"
        return Server(address, tls_certificates=certificates, middleware={"guard": Guard()})
    except pa.ArrowException as error:
        raise ValueError(
            f"port is {port}; allowed: one that can be listened on at {host}: {_one_line(error)}"
        ) from error


def _act(service: ReplayService, kind: str, buffer: pa.Buffer) -> bytes:
    if buffer.size > LARGEST_REQUEST_BYTES:
        raise ValueError(f"message is {buffer.size} bytes; allowed: at most {LARGEST_REQUEST_BYTES}")
    body = buffer.to_pybytes()
    if kind == "describe":
        return service.description.to_bytes()
    if kind == "update":
        return json.dumps(service.update(UpdateRequest.from_bytes(body))).encode()
    if kind == "heartbeat":
        return service.heartbeat(FromClient.from_bytes(body))
    if kind == "leave":
        service.leave(FromClient.from_bytes(body))
        return b""
    raise ValueError(f"action is {kind!r:.80}; allowed: describe, update, heartbeat, leave")


def _refuse_taken_port(host: str, port: int) -> None:
    """Else gRPC would write several lines of its own to stderr, and share the port with another service."""
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise ValueError(f"port is {port}; allowed: one that can be listened on at {host}: {error.strerror}") from error


class ServiceConnection:
    """A client's side. Calls may come from several threads; each is over within ``CALL_SECONDS``.

    While the service is away a warning says so every few seconds, and another one when it is back.

    Args:
        address: ``grpc://host:port``, or ``grpc+tls://`` of a service with a certificate.

    Raises:
        ValueError: an address of another form.

    Attributes:
        losses: how often the service has been lost.
    """

    def __init__(
        self,
        address: str,
        security: ClientSecurity = NO_TOKEN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_address(address)
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # Else each failed TLS handshake is a line of gRPC's own.
        from pyarrow import flight

        self.address, self.losses = address, 0
        self._flight, self._clock = flight, clock
        backoff = [
            (f"grpc.{which}_reconnect_backoff_ms", RECONNECT_MILLISECONDS) for which in ("initial", "min", "max")
        ]
        self._client = flight.connect(address, tls_root_certs=security.authority, generic_options=backoff)
        self._options = flight.FlightCallOptions(timeout=CALL_SECONDS, headers=security.headers)
        self._lock = threading.Lock()
        self._lost_at: float | None = None
        self._said_at = 0.0

    @property
    def is_lost(self) -> bool:
        return self._lost_at is not None

    def close(self) -> None:
        self._client.close()

    def act(self, kind: str, body: bytes) -> bytes:
        """Raises ServiceLost, or ValueError with the line by which the service refused."""

        def ask() -> bytes:
            (result,) = self._client.do_action(self._flight.Action(kind, body), self._options)
            return result.body.to_pybytes()

        return self._call(ask)

    def get(self, ticket: bytes) -> pa.RecordBatch:
        """One record batch. Raises like ``act``."""

        def ask() -> pa.RecordBatch:
            return self._client.do_get(self._flight.Ticket(ticket), self._options).read_chunk().data

        return self._call(ask)

    def _call(self, ask: Callable[[], Answer]) -> Answer:
        flight = self._flight
        try:
            answer = ask()
        except (flight.FlightUnavailableError, flight.FlightTimedOutError, flight.FlightCancelledError) as error:
            self._note_loss(error)
            raise ServiceLost(self.address) from None
        except (pa.ArrowException, StopIteration) as error:
            raise ValueError(f"the replay service at {self.address} refuses: {_one_line(error)}") from None
        self._note_answer()
        return answer

    def _note_loss(self, error: Exception) -> None:
        with self._lock:
            now = self._clock()
            if self._lost_at is None:
                self._lost_at, self._said_at = now, -float("inf")
                self.losses += 1
            if now - self._said_at >= SAY_SECONDS:
                self._said_at = now
                reason = "no answer" if isinstance(error, self._flight.FlightTimedOutError) else "not there"
                if re.search(r"handshak|certificate|SSL", str(error), re.IGNORECASE):
                    reason = "its TLS certificate is not trusted (--tls-ca), or only one of us uses TLS (grpc+tls://);"
                _log.warning("the replay service at %s: %s for %.0f s", self.address, reason, now - self._lost_at)

    def _note_answer(self) -> None:
        if self._lost_at is None:
            return
        with self._lock:
            if self._lost_at is not None:
                _log.warning("the replay service at %s is back", self.address)
            self._lost_at = None


def check_address(address: str) -> None:
    """Raise ValueError unless ``address`` is ``grpc://host:port`` or ``grpc+tls://host:port``."""
    parts = urlsplit(address)
    try:
        is_whole = (
            parts.scheme in (SCHEME, TLS_SCHEME) and parts.hostname and parts.port and not (parts.path or parts.query)
        )
    except ValueError:  # A port that is no number.
        is_whole = False
    if not is_whole:
        raise ValueError(f"replay is {address!r}; allowed: {SCHEME}://host:port, {TLS_SCHEME}://host:port")


def _one_line(error: BaseException) -> str:
    text = re.sub(r"\.? ?(Detail: |gRPC client debug context: ).*", "", str(error), flags=re.DOTALL)
    return " ".join(text.split()) or type(error).__name__
