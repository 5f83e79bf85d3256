"""The ingresses that a client knows: connections to each, and which one to call.

A client stays with one ingress for as long as it answers, and goes on to the next one when it does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import grpc

from cluster.client.channel import open_channel
from cluster.ingress.protos.raypd.v1 import admin_pb2_grpc, generate_pb2_grpc, model_pb2_grpc

_CONNECT_TIMEOUT_S: Final = 3.0
"""Of an address that does not even refuse."""


class Ingress:
    """One address. Belongs to the event loop that it is made on."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = open_channel(address)
        self._shunned_until_s = 0.0
        self.generate = generate_pb2_grpc.GenerateServiceStub(self._channel)
        self.model = model_pb2_grpc.ModelServiceStub(self._channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    def shun(self, delay_s: float) -> None:
        """Do not choose it for so long."""
        self._shunned_until_s = max(self._shunned_until_s, asyncio.get_running_loop().time() + delay_s)

    @property
    def is_connected(self) -> bool:
        """Whether it is now, as far as is known."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def connect(self, timeout_s: float) -> bool:
        """Connect, unless it is; returns whether that has worked."""
        failed = grpc.ChannelConnectivity.TRANSIENT_FAILURE
        try:
            async with asyncio.timeout(timeout_s):
                while (state := self._channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                    if state is failed:
                        return False
                    await self._channel.wait_for_state_change(state)
        except TimeoutError:
            return False
        return True

    async def wait_usable(self) -> None:
        """Wait until it is connected, and not shunned."""
        await asyncio.sleep(self._shunned_until_s - asyncio.get_running_loop().time())
        await self._channel.channel_ready()

    async def close(self) -> None:
        """Hang up; its calls end."""
        await self._channel.close()


class Ingresses:
    """All of them, in the order in which they are preferred."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """addresses: at least one."""
        self._ingresses = [Ingress(address) for address in addresses]

    def __len__(self) -> int:
        return len(self._ingresses)

    async def find(self, timeout_s: float | None) -> Ingress:
        """The first one that can be connected to now; the preferred one, which will say why, if none can.

        timeout_s: how long each of them may take, at most
        """
        limit_s = _CONNECT_TIMEOUT_S if timeout_s is None else min(_CONNECT_TIMEOUT_S, timeout_s)
        for ingress in list(self._ingresses):
            if await ingress.connect(limit_s):
                return ingress
        return self._ingresses[0]

    async def wait_usable(self, timeout_s: float) -> Ingress | None:
        """The first one that is, or becomes, connected and is not shunned; None if none is in time."""
        waits = {asyncio.create_task(ingress.wait_usable()): ingress for ingress in self._ingresses}
        try:
            done, _ = await asyncio.wait(waits, timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED)
            return next((ingress for wait, ingress in waits.items() if wait in done), None)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def put_last(self, ingress: Ingress, delay_s: float) -> None:
        """A call to it has failed: prefer the others, and do not choose it at all for so long."""
        ingress.shun(delay_s)
        self._ingresses.remove(ingress)
        self._ingresses.append(ingress)

    async def close(self) -> None:
        """Hang up everywhere."""
        await asyncio.gather(*(ingress.close() for ingress in self._ingresses))


def parse_addresses(addresses: str | Sequence[str]) -> list[str]:
    """Each host:port, of one string with commas between them or of several. Raises ValueError if there is none."""
    texts = [addresses] if isinstance(addresses, str) else addresses
    found = [address.strip() for text in texts for address in text.split(",") if address.strip()]
    if not found:
        raise ValueError("a client needs the address of at least one ingress, as host:port")
    return found
