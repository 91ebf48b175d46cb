import contextlib
import errno
import socket
from typing import Any

import pytest

from kaveri.addresses import bind_socket, host_text, is_address, is_all_addresses, join_address, split_address


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("", ""),
        ("127.0.0.1", "127.0.0.1"),
        ("gpu-1.example.com", "gpu-1.example.com"),
        ("::", "::"),
        ("[::]", "::"),
        ("[fd00::1]", "fd00::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
    ],
)
def test_a_host_is_read_with_brackets_and_without(text: str, host: str) -> None:
    assert host_text(text) == host
    assert split_address(join_address(text, 50051)) == (host, 50051)


@pytest.mark.parametrize("text", ["127.0.0.1:50051", "[::1]:50051", "[::1", "::1]", "[]", "[gpu-1]", "fd00::x"])
def test_what_is_no_host_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="write a host name or an address, and the port apart"):
        host_text(text)


def test_an_ipv6_host_stands_in_brackets_in_an_address() -> None:
    assert [join_address(host, 1) for host in ("::1", "[::1]", "10.0.0.1")] == ["[::1]:1", "[::1]:1", "10.0.0.1:1"]
    assert [split_address(address) for address in ("[::1]:1", "::1:1", "gpu:1")] == [("::1", 1), ("::1", 1), ("gpu", 1)]
    assert [is_address(text) for text in ("[::1]:1", "[fe80::1%eth0]:1", "::1:1", "[::1]", "[::1]:0")] == [
        *(True, True),
        *(False, False, False),
    ]
    assert [is_all_addresses(host) for host in ("::", "[::]", "0.0.0.0", "::1", "", "gpu")] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("host", "families"),
    [("::", ["127.0.0.1", "::1"]), ("::1", ["::1"]), ("[::1]", ["::1"]), ("0.0.0.0", ["127.0.0.1"])],
)
def test_all_addresses_of_ipv6_take_ipv4_too_and_one_address_does_not(host: str, families: list[str]) -> None:
    reached = []
    with bind_socket(host, 0) as listening:
        listening.listen()
        for peer in ("127.0.0.1", "::1"):
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection((peer, listening.getsockname()[1]), 10).close()
                reached.append(peer)
    assert reached == families


def test_all_addresses_are_those_of_ipv4_where_the_kernel_has_no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ipv4Alone(socket.socket):
        def __init__(self, family: int = -1, *given: Any, **named: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *given, **named)

    monkeypatch.setattr(socket, "socket", Ipv4Alone)
    with bind_socket("::", 0) as bound:
        assert bound.getsockname()[0] == "0.0.0.0"
    with pytest.raises(OSError, match="not supported"):
        bind_socket("::1", 0)


def test_a_port_beyond_the_last_is_refused() -> None:
    with pytest.raises(OverflowError):
        bind_socket("127.0.0.1", 65_536)
