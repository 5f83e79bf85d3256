"""The ingresses that a client knows: connections to each, and which one to call.

A client stays with one ingress for as long as it answers, and goes on to the next one when it does not; or it begins
each request at another one, if it is told to spread them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import grpc

from cluster.api.protos.raypd.v1 import admin_pb2_grpc, embed_pb2_grpc, generate_pb2_grpc, model_pb2_grpc
from cluster.client.channel import open_channel
from cluster.client.client_credentials import Credentials
from cluster.client.retry_limits import retry_delay_s

_CONNECT_TIMEOUT_S: Final = 3.0
"""Of an address that does not even refuse."""
_HEAD_START_S: Final = 0.25
"""Before the next address is tried as well, as RFC 8305 has it."""


class Ingress:
    """One address. Belongs to the event loop that it is made on."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self.address = address
        self._channel = open_channel(address, credentials)
        self._loop = asyncio.get_running_loop()
        self._shunned_until_s = 0.0
        self._num_failures = 0
        self.generate = generate_pb2_grpc.GenerateServiceStub(self._channel)
        self.embed = embed_pb2_grpc.EmbedServiceStub(self._channel)
        self.model = model_pb2_grpc.ModelServiceStub(self._channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    def note_answer(self) -> None:
        """It has answered."""
        self._num_failures = 0

    def note_failure(self, told_s: float | None, rng: random.Random) -> None:
        """A call to it has failed: do not choose it for a while. told_s: how long, if it has said so."""
        if not self.shunned_s:
            self._num_failures += 1  # Calls that one fault has cut together count once.
        delay_s = retry_delay_s(told_s, self._num_failures, rng)
        self._shunned_until_s = max(self._shunned_until_s, self._loop.time() + delay_s)

    @property
    def shunned_s(self) -> float:
        """For how much longer it is not to be chosen."""
        return max(0.0, self._shunned_until_s - self._loop.time())

    @property
    def is_connected(self) -> bool:
        """Whether it is now, as far as is known."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def connect(self, timeout_s: float) -> bool:
        """Connect, unless it is; returns whether that has worked.

        That the last try has failed says nothing about now, when it may be back: the next one is waited for.
        """
        ready, failed = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
        try:
            async with asyncio.timeout(timeout_s):
                state = self._channel.get_state(try_to_connect=True)
                is_news = state is not failed
                while state is not ready:
                    if state is failed and is_news:
                        return False
                    await self._channel.wait_for_state_change(state)
                    state, is_news = self._channel.get_state(try_to_connect=True), True
        except TimeoutError:
            return False
        return True

    async def wait_usable(self) -> None:
        """Wait until it is connected, and not shunned."""
        await asyncio.sleep(self.shunned_s)
        await self._channel.channel_ready()

    async def close(self) -> None:
        """Hang up; its calls end."""
        await self._channel.close()


class Ingresses:
    """All of them, in the order in which they are preferred."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        spread: bool = False,
        credentials: Credentials | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """addresses: at least one; spread: each find() prefers another one; rng: for delays"""
        self._ingresses = [Ingress(address, credentials) for address in addresses]
        self._spread = spread
        self._rng = rng or random.Random()

    def __len__(self) -> int:
        return len(self._ingresses)

    async def find(self, timeout_s: float | None, without: Collection[Ingress] = ()) -> Ingress:
        """The first one that can be connected to; the preferred one, which will say why, if none can in time.

        The next one is tried as well when those before it have failed, or have not connected at once.
        without: not these; others must be left
        """
        limit_s = _CONNECT_TIMEOUT_S if timeout_s is None else min(_CONNECT_TIMEOUT_S, timeout_s)
        candidates = [ingress for ingress in self._ingresses if ingress not in without]
        ingresses = sorted(candidates, key=lambda ingress: ingress.shunned_s > 0)
        if self._spread:
            self._ingresses.append(self._ingresses.pop(0))
        connecting: dict[asyncio.Task[bool], Ingress] = {}
        try:
            for ingress in ingresses:
                if ingress.is_connected:
                    return ingress
                connecting[asyncio.create_task(ingress.connect(limit_s))] = ingress
                if (found := await _first_connected(connecting, _HEAD_START_S)) is not None:
                    return found
            return await _first_connected(connecting, limit_s) or ingresses[0]
        finally:
            await _cancel(connecting)

    async def wait_usable(self, timeout_s: float) -> Ingress | None:
        """The first one that is, or becomes, connected and is not shunned; None if none is in time."""
        waits = {asyncio.create_task(ingress.wait_usable()): ingress for ingress in self._ingresses}
        try:
            done, _ = await asyncio.wait(waits, timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED)
            return next((ingress for wait, ingress in waits.items() if wait in done), None)
        finally:
            await _cancel(waits)

    def put_last(self, ingress: Ingress, told_s: float | None) -> None:
        """A call to it has failed: prefer the others. told_s: when to try it again, if it has said so."""
        ingress.note_failure(told_s, self._rng)
        self._ingresses.remove(ingress)
        self._ingresses.append(ingress)

    async def close(self) -> None:
        """Hang up everywhere."""
        await asyncio.gather(*(ingress.close() for ingress in self._ingresses))


async def _first_connected(connecting: dict[asyncio.Task[bool], Ingress], timeout_s: float) -> Ingress | None:
    """The first that does in time; those that cannot are taken out."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while connecting:
        done, _ = await asyncio.wait(
            connecting, timeout=max(0.0, end_s - loop.time()), return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            break
        for task in done:
            ingress = connecting.pop(task)
            if task.result():
                return ingress
    return None


async def _cancel(tasks: Iterable[asyncio.Task[bool]] | Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def parse_addresses(addresses: str | Sequence[str]) -> list[str]:
    """Each host:port, of one string with commas between them or of several. Raises ValueError if there is none."""
    texts = [addresses] if isinstance(addresses, str) else addresses
    found = [address.strip() for text in texts for address in text.split(",") if address.strip()]
    if not found:
        raise ValueError("a client needs the address of at least one ingress, as host:port")
    return found
