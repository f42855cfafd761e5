"""Who gets to talk to a replay service: the real Flight server with tokens and TLS."""

import contextlib
import datetime
import ipaddress
import logging
import socket

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pipeline.flight import OPEN, ServiceConnection, serve
from pipeline.replay_client import describe
from pipeline.replay_messages import LARGEST_REQUEST_BYTES
from pipeline.replay_security import ClientSecurity, ServerSecurity, is_loopback, read_token
from pipeline.replay_service import ReplayService
from tests.pipeline.replay_factory import make_replay, unsynced
from tests.pipeline.sequence_factory import make_dataset, tiny_terms

TERMS = tiny_terms()
TOKEN = "a token that nobody guesses"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with unsynced():
        store = make_dataset(tmp_path_factory.mktemp("data"), TERMS, 20)
    replay = make_replay(store)
    replay.poll()
    return ReplayService(replay, TERMS, run="svc", dataset="data", largest_batch=16)


@pytest.fixture(scope="module")
def certificate() -> tuple[bytes, bytes]:
    """Certificate and key of 127.0.0.1, PEM."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
        now + datetime.timedelta(days=1)
    )
    signed = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return signed.public_bytes(serialization.Encoding.PEM), private


@contextlib.contextmanager
def served(service, security=OPEN):
    server = serve(service, "127.0.0.1", 0, security)
    try:
        yield f"{'grpc+tls' if security.tls else 'grpc'}://127.0.0.1:{server.port}"
    finally:
        server.shutdown()


@contextlib.contextmanager
def connected(address, **security):
    connection = ServiceConnection(address, ClientSecurity(**security))
    yield connection
    connection.close()


def test_with_the_token_the_service_answers_without_it_or_with_another_it_says_nothing(service):
    wrong = [None, "", TOKEN[:-1], TOKEN + "x", TOKEN.upper()]
    with served(service, ServerSecurity(token=TOKEN)) as address:
        with connected(address, token=TOKEN) as connection:
            assert describe(connection).run == "svc"
        for token in wrong:
            with connected(address, token=token) as connection:
                calls = [("describe", b""), ("update", b"{}"), ("no such action", b"")]
                for kind, body in calls:
                    with pytest.raises(ValueError) as refusal:
                        connection.act(kind, body)
                    assert str(refusal.value) == f"the replay service at {address} refuses: not allowed"
                with pytest.raises(ValueError, match=r"refuses: not allowed$"):
                    connection.get(b'{"client": "one", "number": 0, "batch_size": 8}')
    assert service.clients == 0


def test_over_tls_the_token_is_asked_for_and_the_certificate_checked(service, certificate, caplog):
    caplog.set_level(logging.WARNING)
    signed, key = certificate
    with served(service, ServerSecurity(token=TOKEN, certificate=signed, key=key)) as address:
        with connected(address, token=TOKEN, authority=signed) as connection:
            assert describe(connection).run == "svc"
        with connected(address, authority=signed) as connection, pytest.raises(ValueError, match=r"not allowed$"):
            describe(connection)
        with connected(address, token=TOKEN) as connection:  # Signed by nobody whom the system trusts.
            assert describe(connection) is None
        assert "its TLS certificate is not trusted (--tls-ca)" in caplog.text
        with connected(address.replace("grpc+tls", "grpc"), token=TOKEN) as connection:
            assert describe(connection) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "some.host"])
def test_other_machines_need_a_token(service, host):
    with pytest.raises(ValueError, match=r"host is .*; allowed: a loopback address, or any with --token-file"):
        serve(service, host, 0)


def test_with_a_token_any_address_may_be_listened_on(service):
    server = serve(service, "0.0.0.0", 0, ServerSecurity(token=TOKEN))
    with connected(f"grpc://127.0.0.1:{server.port}", token=TOKEN) as connection:
        assert describe(connection).run == "svc"
    server.shutdown()


@pytest.mark.parametrize(("host", "loopback"), [
    ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False),
    ("10.0.0.1", False), ("localhost.example.org", False), ("", False),
])  # fmt: skip
def test_what_counts_as_loopback(host, loopback):
    assert is_loopback(host) == loopback


def test_oversized_requests_and_noise_are_refused_and_the_service_goes_on(service):
    with served(service) as address, connected(address) as connection:
        for kind in ("describe", "update", "heartbeat", "leave"):
            with pytest.raises(ValueError, match=f"is {LARGEST_REQUEST_BYTES + 1} bytes; allowed: at most"):
                connection.act(kind, b" " * (LARGEST_REQUEST_BYTES + 1))
        for noise in (b"\x00" * 100, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 5000):
            with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as raw:
                raw.sendall(noise)
        assert describe(connection).run == "svc"


def test_methods_that_a_replay_service_has_not_are_refused(service):
    from pyarrow import flight

    options = flight.FlightCallOptions(timeout=4)
    with served(service) as address, flight.connect(address) as client:
        for call in (client.list_flights, client.list_actions):
            with pytest.raises(flight.FlightServerError, match="no such method; allowed: DoGet, DoAction"):
                list(call(options=options))


def test_the_token_is_read_from_a_file_or_the_environment_and_never_shown(tmp_path, monkeypatch):
    monkeypatch.delenv("R2D2_REPLAY_TOKEN", raising=False)
    file = tmp_path / "token"
    assert read_token(None) is None
    monkeypatch.setenv("R2D2_REPLAY_TOKEN", f" {TOKEN}\n")
    assert read_token(None) == TOKEN
    file.write_text("the token in the file\n")
    assert read_token(file) == "the token in the file"
    for bad in ("short", "", "with a line\nbreak in it", "not of ASCII: äöü äöü"):
        file.write_text(bad)
        with pytest.raises(ValueError, match="allowed: 16 or more, printable ASCII") as refusal:
            read_token(file)
        assert not bad or bad not in str(refusal.value)
    with pytest.raises(ValueError, match=r"token_file is .*missing.*; allowed: a readable file"):
        read_token(tmp_path / "missing")


def test_a_certificate_needs_its_key(certificate):
    with pytest.raises(ValueError, match="tls_cert, tls_key are one alone"):
        ServerSecurity(token=TOKEN, certificate=certificate[0])
