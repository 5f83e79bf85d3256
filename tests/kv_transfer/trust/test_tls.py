"""TLS between processes of a cluster, over real sockets and gRPC.

Tests of kv_transfer/trust/authority.py, kv_transfer/trust/tls_socket.py.
"""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from kv_transfer.errors import NotRaypd, TlsUnusable
from kv_transfer.trust.authority import draw_tls_material
from kv_transfer.trust.tls import CLUSTER_NAME, InternalTls, TlsFiles, TlsMaterial, listen, open_channel, shake_hands
from kv_transfer.trust.tls_socket import TlsSocket
from tests.kv_transfer.trust.certificates import certified, write_tls_files

_TIMEOUT_S = 60.0
_METHOD = "/test/Echo"


@pytest.fixture(scope="module")
def material() -> TlsMaterial:
    return draw_tls_material()


@pytest.fixture(scope="module")
def tls(material: TlsMaterial) -> InternalTls:
    return InternalTls(material)


def _in_thread(call: Callable[[], object]) -> Future[object]:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call)


@contextmanager
def _joined(dialling: InternalTls | None, accepting: InternalTls | None) -> Iterator[tuple[object, object]]:
    """Yield what both ends' handshakes gave: their TLS sockets, or their errors. None: that end sends plain bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(2) as pool:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        ends = [
            _plain(dialled) if dialling is None else dialling.dialling(dialled),
            _plain(accepted) if accepting is None else accepting.accepting(accepted),
        ]
        try:
            yield tuple(pool.map(_shaken, ends))  # type: ignore[misc]  # it is a pair
        finally:
            for end in ends:
                end.close()


def _plain(connection: socket.socket) -> socket.socket:
    connection.sendall(b"raypd, in plain text, and for long enough to be a record's header")
    return connection


def _shaken(end: socket.socket | TlsSocket) -> object:
    if isinstance(end, TlsSocket):
        try:
            shake_hands(end, time.monotonic() + _TIMEOUT_S)
            end.settimeout(_TIMEOUT_S)
            end.sendall(b"x")
            assert end.recv(1) == b"x", "the other end has closed the connection"
        except (NotRaypd, OSError, AssertionError) as error:
            end.close()
            return error
    return end


@pytest.fixture
def ends(tls: InternalTls) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    with _joined(tls, tls) as (dialled, accepted):
        assert isinstance(dialled, TlsSocket)
        assert isinstance(accepted, TlsSocket)
        yield dialled, accepted


def test_a_drawn_certificate_is_for_the_clusters_name_and_nobody_has_its_authoritys_key(material: TlsMaterial) -> None:
    certificate = x509.load_pem_x509_certificate(material.certificate)
    authority = x509.load_pem_x509_certificate(material.authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value

    assert names.get_values_for_type(x509.DNSName) == [CLUSTER_NAME]
    assert set(usage) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    certificate.verify_directly_issued_by(authority)
    assert material.key.count(b"PRIVATE KEY") == 2
    assert b"PRIVATE KEY" not in material.authority + material.certificate
    assert "PRIVATE" not in repr(material)


def test_bytes_pass_in_both_directions_at_once(ends: tuple[TlsSocket, TlsSocket]) -> None:
    sent = os.urandom(4 * 2**20)

    def receive(end: TlsSocket) -> bytes:
        received = bytearray(len(sent))
        view = memoryview(received)
        while view:
            view = view[end.recv_into(view) :]
        return bytes(received)

    with ThreadPoolExecutor(4) as pool:
        # Each end is read by one thread while another writes, and all four wait for each other.
        for end in ends:
            end.settimeout(60.0)
        sending = [pool.submit(end.sendall, sent) for end in ends]
        receiving = [pool.submit(receive, end) for end in ends]
        assert [future.result(60) for future in receiving] == [sent, sent]
        assert [future.result(60) for future in sending] == [None, None]


def test_nothing_is_there_until_it_comes_and_a_wait_ends_with_its_timeout(ends: tuple[TlsSocket, TlsSocket]) -> None:
    one, other = ends
    buffer = bytearray(3)
    assert one.try_recv_into(memoryview(buffer)) is None
    one.settimeout(0.01)
    with pytest.raises(TimeoutError):
        one.recv_into(buffer)
    other.sendall(b"abc")
    one.settimeout(_TIMEOUT_S)
    assert (one.recv_into(buffer), bytes(buffer)) == (3, b"abc")


def test_a_full_connection_takes_nothing_without_waiting(ends: tuple[TlsSocket, TlsSocket]) -> None:
    chunk = memoryview(bytes(2**20))
    for _ in range(1000):
        if not ends[0].try_send(chunk):
            break
    else:
        raise AssertionError("it never fills up")


def test_what_was_accepted_without_waiting_arrives_whole_and_in_order(ends: tuple[TlsSocket, TlsSocket]) -> None:
    """Whenever the kernel takes a part of what was encrypted, the rest goes first, before the bytes are counted."""
    one, other = ends
    sent, received = memoryview(os.urandom(8 * 2**20)), bytearray(8 * 2**20)
    waiting, free = sent, memoryview(received)
    num_full = 0
    give_up_s = time.monotonic() + 60.0
    while free:
        assert time.monotonic() < give_up_s
        while waiting and (num_bytes := one.try_send(waiting)):
            waiting = waiting[num_bytes:]
        num_full += bool(waiting)
        while free and (num_bytes := other.try_recv_into(free[:100_003]) or 0):
            free = free[num_bytes:]
    assert received == sent
    assert num_full > 0, "the kernel never had no room"


def test_a_send_that_was_too_late_lets_nothing_else_take_the_place_of_its_rest(
    ends: tuple[TlsSocket, TlsSocket],
) -> None:
    one, _ = ends
    one.settimeout(0.05)
    with pytest.raises(TimeoutError):
        one.sendall(bytes(64 * 2**20))
    with pytest.raises(OSError, match="pipe"):
        one.sendall(b"something else")


def test_a_stream_that_ends_in_the_middle_of_a_record_ends(tls: InternalTls) -> None:
    with _joined(tls, tls) as (one, other):
        assert isinstance(one, TlsSocket)
        assert isinstance(other, TlsSocket)
        one.sendall(bytes(10))
        with socket.socket(fileno=os.dup(one.fileno())) as below:
            below.sendall(b"\x17\x03\x03\x40\x00half a record")
        one.shutdown(socket.SHUT_WR)
        buffer = memoryview(bytearray(100))
        assert other.recv_into(buffer) == 10
        assert other.recv_into(buffer) == 0


def test_bytes_that_somebody_changed_on_the_way_break_the_connection(ends: tuple[TlsSocket, TlsSocket]) -> None:
    one, other = ends
    with socket.socket(fileno=os.dup(one.fileno())) as below:
        below.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(ssl.SSLError):
        other.recv(1)


def test_shutting_it_down_wakes_who_waits_here_and_there(ends: tuple[TlsSocket, TlsSocket]) -> None:
    one, other = ends
    is_waiting = threading.Barrier(3)

    def wait(end: TlsSocket) -> bytes:
        is_waiting.wait(_TIMEOUT_S)
        return end.recv(1)

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(wait, end) for end in (one, other)]
        is_waiting.wait(_TIMEOUT_S)
        one.shutdown(socket.SHUT_RDWR)
        assert [future.result(_TIMEOUT_S) for future in waiting] == [b"", b""]
    with pytest.raises((BrokenPipeError, ssl.SSLError)):
        one.sendall(b"not in plain text either")


@pytest.mark.parametrize("stranger", ["dialler", "acceptor"])
def test_who_has_another_authoritys_certificate_is_refused(tls: InternalTls, stranger: str) -> None:
    strange = InternalTls(draw_tls_material())
    pair = (strange, tls) if stranger == "dialler" else (tls, strange)
    with _joined(*pair) as results:
        assert not any(isinstance(result, TlsSocket) for result in results)
        assert any("its certificate is not of this cluster's authority" in str(result) for result in results)


@pytest.mark.parametrize("plain", ["dialler", "acceptor"])
def test_who_speaks_no_tls_is_refused_by_a_reason_that_names_the_setting(tls: InternalTls, plain: str) -> None:
    pair = (None, tls) if plain == "dialler" else (tls, None)
    with _joined(*pair) as results:
        [refusal] = [result for result in results if isinstance(result, Exception)]
    assert "internal_tls has to be the same at both ends" in str(refusal)


def test_a_peer_that_says_nothing_ends_the_handshake_in_time(tls: InternalTls) -> None:
    one, other = socket.socketpair()
    with other:
        end = tls.dialling(one)
        with pytest.raises(TimeoutError):
            shake_hands(end, time.monotonic() + 0.05)
        end.close()


def test_files_that_change_are_used_and_files_that_are_wrong_are_not(tmp_path: Path) -> None:
    first, second = draw_tls_material(), draw_tls_material()
    files = write_tls_files(tmp_path, first)
    now_s = 0.0
    tls = InternalTls(files, clock=lambda: now_s)

    write_tls_files(tmp_path, TlsMaterial(second.authority, second.certificate, first.key))
    now_s = 2.0
    with _joined(tls, InternalTls(first)) as results:
        assert all(isinstance(result, TlsSocket) for result in results), "the first ones stay"
    write_tls_files(tmp_path, second)
    now_s = 4.0
    with _joined(tls, InternalTls(second)) as results:
        assert all(isinstance(result, TlsSocket) for result in results)


def test_files_that_cannot_be_used_at_the_start_are_named(tmp_path: Path) -> None:
    files = TlsFiles(*(str(tmp_path / name) for name in ("ca.crt", "tls.crt", "tls.key")))
    with pytest.raises(TlsUnusable, match=r"ca\.crt cannot be read"):
        InternalTls(files)
    write_tls_files(tmp_path, TlsMaterial(b"none", b"none", b"none"))
    with pytest.raises(TlsUnusable, match="cannot be used"):
        InternalTls(files)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o660])
def test_a_private_key_that_others_can_use_is_refused(tmp_path: Path, material: TlsMaterial, mode: int) -> None:
    files = write_tls_files(tmp_path, material)
    Path(files.key).chmod(mode)
    with pytest.raises(TlsUnusable, match=rf"^internal_tls: .*tls\.key: has mode {mode:04o}.*chmod 0600"):
        InternalTls(files)
    Path(files.key).chmod(0o440)
    InternalTls(files)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "raypd.example"}, "Hostname mismatch"),
        ({"usages": [ExtendedKeyUsageOID.SERVER_AUTH]}, "un(suitable|supported) certificate purpose"),
        ({"usages": [ExtendedKeyUsageOID.CLIENT_AUTH]}, "un(suitable|supported) certificate purpose"),
        ({"ends_in": datetime.timedelta(days=-1)}, "certificate has expired"),
    ],
)
def test_a_certificate_that_every_connection_would_refuse_is_refused_first(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(TlsUnusable, match=f"{says}.*; it has to be .* for the DNS name {CLUSTER_NAME}"):
        InternalTls(certified(**settings))


def test_a_certificate_of_another_authority_than_the_one_beside_it_is_refused(material: TlsMaterial) -> None:
    other = certified()
    InternalTls(other)
    with pytest.raises(TlsUnusable, match="processes that show this certificate would refuse each other"):
        InternalTls(TlsMaterial(other.authority, material.certificate, material.key))


@asynccontextmanager
async def _echo(tls: InternalTls | None) -> AsyncIterator[str]:
    async def echo(message: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return message

    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Echo": handler}),))
    address = f"127.0.0.1:{listen(server, '127.0.0.1:0', tls)}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def _ask(address: str, tls: InternalTls | None) -> bytes | grpc.StatusCode:
    async with open_channel(address, (), tls) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_METHOD)
        try:
            return await call(b"hello", timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return error.code()


async def test_grpc_calls_pass_between_processes_of_one_cluster_only(tls: InternalTls) -> None:
    stranger = InternalTls(draw_tls_material())
    async with _echo(tls) as address:
        assert await _ask(address, tls) == b"hello"
        assert await _ask(address, stranger) is grpc.StatusCode.UNAVAILABLE
        assert await _ask(address, None) is grpc.StatusCode.UNAVAILABLE
    async with _echo(None) as address:
        assert await _ask(address, tls) is grpc.StatusCode.UNAVAILABLE
