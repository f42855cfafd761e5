"""Who may talk to a replay service, and whether others can listen: a token that both sides know, and TLS.

Anyone who can connect to a service without a token can draw and set priorities, so without one it listens on loopback
only. The token comes from a file or the environment: a command line can be read by every user of a machine.
"""

import hmac
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKEN_VARIABLE = "R2D2_REPLAY_TOKEN"
SHORTEST_TOKEN = 16
HEADER = "authorization"


@dataclass(frozen=True, kw_only=True)
class ServerSecurity:
    """What a service asks of those who connect.

    Attributes:
        token: that every call must bring; None: none.
        certificate, key: PEM; both or neither.
    """

    token: str | None = None
    certificate: bytes | None = None
    key: bytes | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("tls_cert, tls_key are one alone; allowed: both or neither")

    @property
    def tls(self) -> bool:
        return self.certificate is not None

    def refuse_open_host(self, host: str) -> None:
        """Raise ValueError when ``host`` is reachable from other machines and there is no token."""
        if self.token is None and not is_loopback(host):
            raise ValueError(
                f"host is {host}; allowed: a loopback address, or any with --token-file or {TOKEN_VARIABLE}"
            )

    def accepts(self, headers: dict[str, list[Any]]) -> bool:
        """Whether a call with these headers may go on. Takes the same time however much of a wrong token is right."""
        if self.token is None:
            return True
        given = headers.get(HEADER, [""])[0]
        given = given if isinstance(given, bytes) else str(given).encode()
        return hmac.compare_digest(given, _bearer(self.token))


@dataclass(frozen=True, kw_only=True)
class ClientSecurity:
    """What a client shows, and whom it trusts.

    Attributes:
        token: sent with every call; None: none.
        authority: PEM certificates that a service's must be signed by (its own will do); None: the system's.
    """

    token: str | None = None
    authority: bytes | None = None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [] if self.token is None else [(HEADER.encode(), _bearer(self.token))]


def is_loopback(host: str) -> bool:
    """Whether ``host`` can only be reached from this machine. A name other than localhost may be any address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(path: Path | None) -> str | None:
    """The token in the file ``path``, else that of the environment, else None.

    Raises:
        ValueError: a file that cannot be read, or a token that can be guessed or not be sent. Never shows it.
    """
    if path is not None:
        token, source = read_file(path, "token_file").decode(errors="replace").strip(), f"token_file {path}"
    elif (given := os.environ.get(TOKEN_VARIABLE)) is not None:
        token, source = given.strip(), TOKEN_VARIABLE
    else:
        return None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ValueError(f"{source} holds {len(token)} characters; allowed: {SHORTEST_TOKEN} or more, printable ASCII")
    return token


def read_file(path: Path, flag: str) -> bytes:
    """Raises ValueError naming ``flag`` when the file cannot be read."""
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise ValueError(f"{flag} is {str(path)!r}; allowed: a readable file ({error.strerror})") from error


def _bearer(token: str) -> bytes:
    return f"Bearer {token}".encode()
