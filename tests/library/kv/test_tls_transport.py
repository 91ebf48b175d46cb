"""KV over TLS: which peers are accepted, what refused peers are told, and that the bytes are encrypted."""

import contextlib
import itertools
import os
import selectors
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kaveri.errors import ConfigError
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.receiver import KvReceiver, TransferLanded
from kaveri.kv.transfer.sender import PushAccepted
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import LinkLost, Transport
from kaveri.kv.transports import make_transports, tcp_transport
from kaveri.kv.transports.frames import HELLO_BYTES, pack_hello
from kaveri.kv.transports.tls import TlsTransport
from kaveri.kv.transports.tls_stream import TlsStream
from kaveri.security import tls_files
from kaveri.security.tls_files import TlsFiles
from kaveri.testing.transport_conformance import TransportConformance
from kaveri.testing.transport_peer import WAIT_S, Recorder, fill_pool
from kaveri.testing.transport_world import SMALL_LAYOUT
from tests.library.kv.kv_pair import failure, limited, push, receiving, require_lands, sending
from tests.support.certificates import FILES_VARIABLE, Authority

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates with")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return Authority(tmp_path_factory.mktemp("others"), "others").certify("stranger")


@pytest.fixture(scope="module")
def expired(authority: Authority) -> TlsFiles:
    return authority.certify("expired", days=-1)


@pytest.fixture(scope="module")
def misnamed(authority: Authority) -> TlsFiles:
    return authority.certify("misnamed", dns="other-cluster")


@pytest.fixture(scope="module", autouse=True)
def files(authority: Authority) -> Iterator[TlsFiles]:
    files = authority.certify("instance")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FILES_VARIABLE, os.pathsep.join((files.certificate, files.key, files.authority)))
        yield files


class TestTls(TransportConformance):
    factory = "tests.support.certificates:tls_transport"

    def address(self, directory: Path) -> str:
        return "127.0.0.1:0"


def listening_with(transport: Transport) -> AbstractContextManager[tuple[KvReceiver, Recorder]]:
    listen = KvEndpoint(transport.name, "127.0.0.1:0")
    return receiving(KvPool(SMALL_LAYOUT, 8), listen, transports=[transport], epoch=7)


def refusal(transport: Transport, receiver: KvReceiver) -> str:
    listener = Mock()
    with pytest.raises(LinkLost) as lost:
        transport.connect(receiver.endpoints[0], 7, KvPool(SMALL_LAYOUT, 1), listener)
    assert not listener.method_calls
    return lost.value.reason


def connected(receiver: KvReceiver) -> socket.socket:
    host, _, port = receiver.endpoints[0].address.rpartition(":")
    return socket.create_connection((host, int(port)), WAIT_S)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.authority)
    context.check_hostname = False
    return context


@contextlib.contextmanager
def tapped(address: str) -> Iterator[tuple[str, bytearray]]:
    """Proxy for one connection to this address: yields the proxy's address, and the bytes sent to the listener."""
    host, _, port = address.rpartition(":")
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as stack:

        def carry(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    seen += data
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        def serve() -> None:
            near, _ = listening.accept()
            far = socket.create_connection((host, int(port)))
            with near, far:
                back = threading.Thread(target=carry, args=(far, near, bytearray()))
                back.start()
                carry(near, far, seen)
                back.join()

        thread = threading.Thread(target=serve)
        thread.start()
        stack.callback(thread.join, WAIT_S)
        yield f"127.0.0.1:{listening.getsockname()[1]}", seen


@pytest.mark.parametrize("kind", ["tls", "tcp"])
def test_nobody_on_the_way_reads_a_push_as_over_plain_tcp(files: TlsFiles, kind: str) -> None:
    transport = make_transports((kind,), tls=files)[0]
    with listening_with(transport) as (receiver, landed), tapped(receiver.endpoints[0].address) as (address, seen):
        source, pushed = require_lands(receiver, landed, transport, address)
    assert pushed.transport == kind
    shown = [what in seen for what in (pack_hello(), source.memory[0, 3].tobytes())]
    assert shown == [kind == "tcp"] * 2
    assert len(seen) > SMALL_LAYOUT.layer_count * 3 * SMALL_LAYOUT.block_bytes


@pytest.mark.parametrize("refusing", ["receiver", "sender"])
@pytest.mark.parametrize(
    ("trouble", "words", "alert"),
    [
        ("stranger", "the peer's certificate: unable to get local issuer certificate", "unknown ca"),
        ("expired", "the peer's certificate: certificate has expired", "expired"),
        # It asks for our name, and carries another.
        ("misnamed", "the peer's certificate does not carry the name kaveri", None),
    ],
)
def test_a_certificate_of_another_authority_time_or_cluster_is_refused(
    files: TlsFiles,
    trouble: str,
    words: str,
    alert: str | None,
    refusing: str,
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
) -> None:
    bad = request.getfixturevalue(trouble)
    # Both trust the same authority; one shows what that has not signed, or not for now.
    bad = TlsFiles(bad.certificate, bad.key, files.authority, files.name)
    sender, owner = (bad, files) if refusing == "receiver" else (files, bad)
    with listening_with(TlsTransport(owner)) as (receiver, landed):
        reason = refusal(TlsTransport(sender), receiver)
        if refusing == "sender":
            assert words in reason
        else:
            assert alert is None or ("the peer refused this side" in reason and alert in reason)
            require_lands(receiver, landed, TlsTransport(files))
    logged = capfd.readouterr().out
    assert "kv_connection_ended" in logged
    if refusing == "receiver":
        assert words in logged
    else:
        assert alert is None or "the peer refused this side" in logged


def test_replaced_files_are_used_by_the_next_connection(
    tmp_path: Path, stranger: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_files, "LOOK_EVERY_S", 0.0)
    ours = Authority(tmp_path).certify("ours")
    with listening_with(TlsTransport(ours)) as (receiver, landed):
        require_lands(receiver, landed, TlsTransport(ours))
        refusal(TlsTransport(stranger), receiver)
        for name in ("certificate", "key", "authority"):
            shutil.copy(getattr(stranger, name), getattr(ours, name))
        require_lands(receiver, landed, TlsTransport(stranger))


class CountedTls(TlsTransport):
    connections = 0

    def connect(self, *arguments: Any) -> Any:
        self.connections += 1
        return super().connect(*arguments)


def test_a_worn_connection_is_replaced_between_two_pushes(files: TlsFiles) -> None:
    transport, source = limited(CountedTls(files), key_records=60), KvPool(SMALL_LAYOUT, 8)
    fill_pool(source, 3)
    with (
        listening_with(TlsTransport(files)) as (receiver, landed),
        sending(source, [transport]) as (sender, pushed),
    ):
        for _ in range(30):
            ticket = receiver.grant([1, 5, 2], 12, 60.0)
            push(sender, ticket, [0, 3, 4])
            assert isinstance(pushed.wait(ticket), PushAccepted)
            assert isinstance(landed.wait(ticket), TransferLanded)
    assert transport.connections > 1


def test_no_more_than_the_limit_is_encrypted_with_one_key(files: TlsFiles) -> None:
    transport, source = limited(TlsTransport(files), key_records=2), KvPool(SMALL_LAYOUT, 8)
    with (
        listening_with(TlsTransport(files)) as (receiver, _),
        sending(source, [transport]) as (sender, pushed),
    ):
        ticket = receiver.grant([1, 5, 2], 12, 60.0)
        push(sender, ticket, [0, 3, 4])
        assert "2 records were encrypted" in failure(pushed, ticket)


def test_a_sender_without_a_certificate_is_refused(files: TlsFiles, capfd: pytest.CaptureFixture[str]) -> None:
    context = client_context(files)
    with listening_with(TlsTransport(files)) as (receiver, landed):
        with connected(receiver) as plain:
            nameless = TlsStream(plain, WAIT_S, context, is_server=False)
            nameless.start()  # TLS 1.3: the receiver looks at certificates after this
            nameless.send([pack_hello()])
            with pytest.raises(LinkLost, match="refused this side: tlsv13 alert certificate required"):
                nameless.receive_bytes(HELLO_BYTES)
        require_lands(receiver, landed, TlsTransport(files))
    assert "the peer showed no certificate" in capfd.readouterr().out


def test_plain_tcp_is_refused(files: TlsFiles, capfd: pytest.CaptureFixture[str]) -> None:
    with listening_with(TlsTransport(files)) as (receiver, landed):
        refusal(tcp_transport(), receiver)
        require_lands(receiver, landed, TlsTransport(files))
    assert "the peer does not speak TLS 1.3" in capfd.readouterr().out


def test_a_receiver_that_speaks_plain_tcp_is_not_pushed_to(files: TlsFiles) -> None:
    with listening_with(tcp_transport()) as (receiver, _):
        assert "tls protocol: in the handshake, the peer closed the connection" in refusal(
            TlsTransport(files), receiver
        )


def test_an_older_tls_is_refused(files: TlsFiles) -> None:
    context = client_context(files)
    context.load_cert_chain(files.certificate, files.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        listening_with(TlsTransport(files)) as (receiver, _),
        connected(receiver) as plain,
        pytest.raises(LinkLost, match="version"),
    ):
        TlsStream(plain, WAIT_S, context, is_server=False).start()


def test_whoever_says_nothing_is_sent_away(files: TlsFiles) -> None:
    with listening_with(limited(TlsTransport(files), progress_timeout_s=2.0)) as (receiver, landed):
        with connected(receiver) as silent:
            assert silent.recv(1) == b""
        require_lands(receiver, landed, TlsTransport(files))


def test_a_handshake_that_trickles_in_has_a_time_limit(files: TlsFiles) -> None:
    hello = b"\x16\x03\x01\x40\x00" + bytes([1, 0, 0x3F, 0xFC])  # a record of 16 KiB begins
    with (
        listening_with(limited(TlsTransport(files), progress_timeout_s=0.1)) as (receiver, _),
        connected(receiver) as slow,
        selectors.DefaultSelector() as selector,
    ):
        selector.register(slow, selectors.EVENT_READ)
        pieces = itertools.chain([hello], itertools.repeat(b"\0", 1000))
        # Never so long a pause that the next piece would be late.
        with contextlib.suppress(ConnectionError):
            while not selector.select(0.01):
                slow.sendall(next(pieces))


def test_each_bad_file_is_named(files: TlsFiles, stranger: TlsFiles, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    encrypt = ("openssl", "pkey", "-in", files.key, "-aes256", "-passout", "pass:secret", "-out", str(locked))
    subprocess.run(encrypt, check=True, timeout=60)
    for field, bad, words in (
        ("kv_tls_cert", replace(files, certificate=str(tmp_path / "none.pem")), "cannot read .*none.pem"),
        ("kv_tls_key", replace(files, key=stranger.key), "is not the key of"),
        ("kv_tls_key", replace(files, key=str(tmp_path)), "cannot read"),
        ("kv_tls_cert", replace(files, key=str(locked)), "unencrypted"),
        ("kv_tls_cert", replace(files, certificate=files.key), "are not a certificate and its key"),
        ("kv_tls_ca", replace(files, authority=files.key), "holds no certificate"),
    ):
        with pytest.raises(ConfigError, match=words) as raised:
            TlsTransport(bad)
        assert raised.value.field == field, bad


def test_tls_without_files_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="tls needs kv_tls_cert"):
        make_transports(("tls",))


@pytest.mark.parametrize("sent_first", [0, 7])
def test_a_sender_that_says_it_sends_nothing_more_is_gone(files: TlsFiles, sent_first: int) -> None:
    context = client_context(files)
    context.load_cert_chain(files.certificate, files.key)
    with listening_with(TlsTransport(files)) as (receiver, landed), connected(receiver) as plain:
        leaving = TlsStream(plain, WAIT_S, context, is_server=False)
        leaving.start()
        leaving.send([pack_hello()])
        leaving.receive_bytes(HELLO_BYTES)
        if sent_first:
            leaving.send([bytes([1] * sent_first)])
        _say_no_more(leaving)
        with pytest.raises(LinkLost):
            leaving.receive_bytes(1 << 20)
        require_lands(receiver, landed, TlsTransport(files))


def test_a_receiver_that_says_it_sends_nothing_more_fails_the_push(files: TlsFiles) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as stack:

        def serve() -> None:
            plain, _ = listening.accept()
            with plain:
                leaving = TlsStream(plain, WAIT_S, context, is_server=True)
                leaving.start()
                leaving.receive_bytes(HELLO_BYTES)
                leaving.send([pack_hello(7)])
                _say_no_more(leaving)
                assert ended.wait(WAIT_S)

        thread = threading.Thread(target=serve)
        thread.start()
        stack.callback(thread.join, WAIT_S)
        stack.callback(ended.set)
        sender, pushed = stack.enter_context(sending(KvPool(SMALL_LAYOUT, 2), [TlsTransport(files)]))
        endpoint = KvEndpoint("tls", f"127.0.0.1:{listening.getsockname()[1]}")
        ticket = Ticket(bytes(16), bytes(16), 7, (endpoint,), (0,), 4, 60.0, SMALL_LAYOUT)
        sender.open(ticket)
        assert "the peer closed the connection" in failure(pushed, ticket)


def _say_no_more(stream: TlsStream) -> None:
    # It would read on to the other end's word, and may find the receiver's credit first.
    with contextlib.suppress(ssl.SSLError):
        stream._tls.unwrap()
    stream._socket.sendall(stream._outgoing.read())
