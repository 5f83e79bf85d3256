"""A connection between two other processes is cut from here, and only that one."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.chaos.cuts import CannotCut, check_can_cut, cut_local_links, cut_tcp

_CLIENT = """
import socket, sys
kept = []
for address in sys.argv[1:]:
    family = socket.AF_UNIX if address.startswith("@") else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.connect("\\0" + address[1:] if family == socket.AF_UNIX else ("127.0.0.1", int(address)))
    kept.append(connection)
print("connected", flush=True)
sys.stdin.read()
"""
_TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def _has_the_right_to_cut() -> None:
    try:
        check_can_cut()
    except CannotCut as error:
        pytest.skip(str(error))


@pytest.fixture
def listeners() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        yield first, second


def _connected(*addresses: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, *addresses], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "connected\n"
    return child


def _port(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


def test_a_tcp_connection_is_cut_and_the_others_stay(listeners: tuple[socket.socket, socket.socket]) -> None:
    with _connected(*(str(_port(listener)) for listener in listeners)) as child:
        cut, _ = listeners[0].accept()
        whole, _ = listeners[1].accept()
        with cut, whole:
            assert cut_tcp(psutil.Process(child.pid), _port(listeners[0])) == 1
            cut.settimeout(_TIMEOUT_S)
            assert cut.recv(1) == b""
            whole.setblocking(False)
            with pytest.raises(BlockingIOError):
                whole.recv(1)
        child.communicate()


def test_the_links_that_a_process_serves_on_this_host_are_cut() -> None:
    name = "raypd-kv-of-this-test"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        with _connected(f"@{name}") as child:
            ours, _ = listener.accept()
            with ours:
                # The listener has the name as well, but no connection that could be cut.
                assert cut_local_links(psutil.Process()) == 1
                ours.settimeout(_TIMEOUT_S)
                assert ours.recv(1) == b""
            child.communicate()
