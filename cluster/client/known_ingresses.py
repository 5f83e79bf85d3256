"""The ingresses that a client knows: its connections to each of them, and the choice of which one to call.

A client stays with one ingress for as long as that one answers, and goes on to the next when it does not. A client that
spreads its requests begins each at another ingress instead.
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
"""The time that a connection may take, for an address that neither accepts nor refuses it."""
_HEAD_START_S: Final = 0.25
"""The time before the next address is tried as well: the Connection Attempt Delay of RFC 8305."""


class Ingress:
    """An ingress at one address, with its channel and stubs. It is used on the event loop that it was made on."""

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
        """Note that the ingress has answered: its failures in a row count from 0 again."""
        self._num_failures = 0

    def note_failure(self, told_s: float | None, rng: random.Random) -> None:
        """Note that a call has failed, and shun the ingress for a while.

        told_s: the delay that the ingress named, in seconds; None: it named none
        """
        if not self.shunned_s:
            self._num_failures += 1  # Several calls that one fault has cut count once.
        delay_s = retry_delay_s(told_s, self._num_failures, rng)
        self._shunned_until_s = max(self._shunned_until_s, self._loop.time() + delay_s)

    @property
    def shunned_s(self) -> float:
        """The seconds for which the ingress is still shunned; 0: it may be chosen."""
        return max(0.0, self._shunned_until_s - self._loop.time())

    @property
    def is_connected(self) -> bool:
        """Whether the channel is connected now, as far as gRPC knows."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def connect(self, timeout_s: float) -> bool:
        """Connect, unless the channel is connected already; returns whether it is connected then.

        A failure of the last try is ignored, because the ingress may be back: the outcome of the next try counts.
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
        """Wait until the ingress is no longer shunned, and connected."""
        await asyncio.sleep(self.shunned_s)
        await self._channel.channel_ready()

    async def close(self) -> None:
        """Close the channel; its calls are cancelled."""
        await self._channel.close()


class Ingresses:
    """All ingresses that a client knows, in the order in which the client prefers them."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        spread: bool = False,
        credentials: Credentials | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Open a channel to each address.

        addresses: at least one host:port; spread: whether each find() prefers another ingress; rng: draws the delays
        """
        self._ingresses = [Ingress(address, credentials) for address in addresses]
        self._spread = spread
        self._rng = rng or random.Random()

    def __len__(self) -> int:
        return len(self._ingresses)

    async def find(self, timeout_s: float | None, without: Collection[Ingress] = ()) -> Ingress:
        """Return the first ingress that can be connected to, or the preferred one if none can be in time.

        A call to the preferred one then fails with the reason. The next ingress is tried as well when those before it
        have failed, or have not connected within 0.25 s.
        timeout_s: the caller's limit in seconds, or None; a connection gets 3 s at most
        without: ingresses that are not considered; at least one other must be left
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
        """Wait for the first ingress that is connected and not shunned, and return it; None if none is in time."""
        waits = {asyncio.create_task(ingress.wait_usable()): ingress for ingress in self._ingresses}
        try:
            done, _ = await asyncio.wait(waits, timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED)
            return next((ingress for wait, ingress in waits.items() if wait in done), None)
        finally:
            await _cancel(waits)

    def put_last(self, ingress: Ingress, told_s: float | None) -> None:
        """Note that a call to an ingress has failed, and prefer the others from now on.

        told_s: the delay that the ingress named, in seconds; None: it named none
        """
        ingress.note_failure(told_s, self._rng)
        self._ingresses.remove(ingress)
        self._ingresses.append(ingress)

    async def close(self) -> None:
        """Close the channels to all ingresses; their calls are cancelled."""
        await asyncio.gather(*(ingress.close() for ingress in self._ingresses))


async def _first_connected(connecting: dict[asyncio.Task[bool], Ingress], timeout_s: float) -> Ingress | None:
    """Return the first ingress that connects in time, or None; ended tasks are taken out of connecting."""
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
    """Return each host:port of a string with commas between them, or of several such strings.

    Raises ValueError if there is none.
    """
    texts = [addresses] if isinstance(addresses, str) else addresses
    found = [address.strip() for text in texts for address in text.split(",") if address.strip()]
    if not found:
        raise ValueError("a client needs the address of at least one ingress, as host:port")
    return found
