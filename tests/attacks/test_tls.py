"""The same attacks over TLS, one of each kind, and those that TLS makes possible."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Final

import pytest

from tests.attacks import connection_attacks, grpc_attacks, http_attacks
from tests.attacks.ingress_settings import IngressSettings
from tests.attacks.target import MAX_GROWTH_MIB, Attack, AttackedIngress, Target, attacked_ingress
from tests.cluster.access.certificates import Authority
from tests.patience import TEST_S

pytestmark = [pytest.mark.more, pytest.mark.timeout(TEST_S)]

_ALL: Final = {
    attack.name: attack for attack in (*grpc_attacks.ATTACKS, *connection_attacks.ATTACKS, *http_attacks.ATTACKS)
}
_ONE_OF_EACH_KIND: Final = (
    "a schema whose enums are compared to each other",
    "a text of 4 million characters",
    "a chat of 10 000 messages",
    "as many parameters of each kind as there may be",
    "5 million empty images",
    "30 endless messages with a wrong token",
    "30 endless messages with a token",
    "30 endless messages to the health service",
    "4000 unfinished streams with a token",
    "30 000 streams that are reset",
    "800 connections that say nothing",
    "50 000 SETTINGS",
    "50 000 PINGs",
    "headers of 98 MiB in CONTINUATION frames",
    "windows that overflow",
    "60 streams that nobody reads",
    "256 MiB in a compressed message",
    "http: headers without end",
    "http: a URL without end",
    "http: a body with a wrong token",
    "http: chunks of a byte",
    "http: chunks without end",
    "http: bodies with wrong tokens that do not end",
    "http: documents that nobody reads",
    "http: 60 streams that nobody reads",
    "http: empty objects",
    "http: messages, within bounds",
)


@pytest.fixture(scope="module")
def ingress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedIngress]:
    """An ingress whose APIs want TLS."""
    directory = tmp_path_factory.mktemp("attacked")
    authority = Authority(directory, "authority")
    files = authority.certify("server")
    settings = IngressSettings({"tls": {"certificate": str(files.certificate), "key": str(files.key)}})
    with attacked_ingress(directory, settings, authority.root) as ingress:
        yield ingress


def to_each_port(data: bytes, num_connections: int) -> Callable[[Target], Awaitable[None]]:
    """Say this on connections without TLS. The answer is an alert of TLS at most."""

    async def send_one(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            with suppress(OSError, TimeoutError):
                writer.write(data)
                async with asyncio.timeout(1.0):
                    await writer.drain()
                    answer = await reader.read(65_536)
                    assert not answer or answer.startswith(b"\x15\x03"), f"more than TLS' alert: {answer[:100]!r}"
        finally:
            writer.transport.abort()

    async def send(target: Target) -> None:
        for port in (target.grpc_port, target.http_port):
            await asyncio.gather(*(send_one(port) for _ in range(num_connections)))

    return send


_HELLO: Final = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 32
"""How a ClientHello begins."""
_PLAIN: Final = [
    Attack("HTTP without TLS", to_each_port(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", 50)),
    Attack("HTTP/2 without TLS", to_each_port(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0", 50)),
    Attack("a megabyte without TLS", to_each_port(b"POST / HTTP/1.1\r\n" + b"a" * 2**20, 30)),
    Attack("300 handshakes that do not end", to_each_port(_HELLO, 300)),
    Attack("300 connections that say nothing", to_each_port(b"", 300)),
]


@pytest.mark.parametrize("attack", [pytest.param(attack, id=attack.name) for attack in _PLAIN])
async def test_what_speaks_no_tls_is_told_nothing_and_felt_by_nobody(attack: Attack, ingress: AttackedIngress) -> None:
    effects = await ingress.suffer(attack)
    assert effects.mistakes() == [], effects


@pytest.mark.parametrize("name", _ONE_OF_EACH_KIND)
async def test_an_attack_over_tls_is_felt_by_nobody(name: str, ingress: AttackedIngress) -> None:
    effects = await ingress.suffer(_ALL[name])
    assert effects.mistakes() == [], effects


async def test_after_all_of_them_the_ingress_is_about_as_large_as_before(ingress: AttackedIngress) -> None:
    assert ingress.rss_mib() - ingress.first_rss_mib < MAX_GROWTH_MIB
