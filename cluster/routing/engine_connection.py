"""An engine as an ingress sees it: where requests are submitted and outputs come back.

The life of a request on a connection: submit() -> outputs -> one that is `finished`, after which the iterator ends.
It ends without that output if the request was aborted, or if this engine was its consumer and the producer finished it
itself (token 0 ended it: the engine names it in finished_req_ids). It raises EngineLost if the session breaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol, TypeAlias

from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.requests.request import EngineCoreRequest
from kv_transfer.links.link_compatibility import PairingFacts
from kv_transfer.params import EngineAddress

EngineKey: TypeAlias = tuple[str, int]
"""Engine id and incarnation."""


class EngineRole(StrEnum):
    """The part of a request that an engine prefers to do."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    ENCODE = "encode"
    """It makes the embeddings of images for engines that prefill."""

    @property
    def computes_prompts(self) -> bool:
        """Whether requests are prefilled there."""
        return self in (EngineRole.PREFILL, EngineRole.BOTH)

    @property
    def generates(self) -> bool:
        """Whether requests are decoded there."""
        return self in (EngineRole.DECODE, EngineRole.BOTH)


_RANK_OF_ROLE: Final = {EngineRole.ENCODE: 0, EngineRole.PREFILL: 1, EngineRole.BOTH: 2, EngineRole.DECODE: 3}
_MAX_ENGINES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineDescriptor:
    """An engine: its name, its incarnation, its role, and how to reach it.

    address: host:port of the engine's gRPC server, for sessions and for KV control
    further_rank_addresses: for KV control of its tensor-parallel ranks 1, 2, …
    pairing: what decides with whom it can exchange KV; None: not known, so that only a handshake tells
    model_version: engines of different ones never work on the same request
    """

    engine_id: str
    incarnation: int
    role: EngineRole
    address: str
    further_rank_addresses: tuple[str, ...] = ()
    pairing: PairingFacts | None = None
    model_version: int = 1

    @property
    def key(self) -> EngineKey:
        """Return the engine's id and incarnation."""
        return self.engine_id, self.incarnation

    @property
    def handoff_rank(self) -> int:
        """Return the engine's rank in the order in which handoffs go: by its role, then by its number."""
        number = self.engine_id.rpartition("-")[2]
        return _RANK_OF_ROLE[self.role] * _MAX_ENGINES + (int(number) % _MAX_ENGINES if number.isdecimal() else 0)

    @property
    def kv_address(self) -> EngineAddress:
        """The engine as its peers in KV transfers know it."""
        return EngineAddress(self.engine_id, self.incarnation, self.address, self.further_rank_addresses)


class EngineConnection(Protocol):
    """One ingress's session with one incarnation of one engine."""

    @property
    def descriptor(self) -> EngineDescriptor:
        """The engine at the other end."""
        ...

    @property
    def num_unfinished_requests(self) -> int:
        """How many requests of this ingress are on that engine: submitted, and neither finished nor aborted."""
        ...

    def submit(self, request: EngineCoreRequest) -> AsyncIterator[EngineCoreOutput]:
        """Send the request, and iterate over what the engine makes of it.

        The request is on its way, in the order of the calls, and counted in num_unfinished_requests when this
        returns, not when the first output is asked for. A broken session raises EngineLost from the iterator, never
        from this call. An iterator may be dropped at any point: abort() frees what is behind it.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Let the engine free everything that the request holds; its iterator ends.

        Returns at once, and does nothing for a request that is unknown or over.
        """
        ...


class EnginePool(Protocol):
    """The engines that an ingress may use."""

    def snapshot(self) -> Sequence[EngineConnection]:
        """The engines that serve now: ready, and not draining."""
        ...

    def next_change(self) -> asyncio.Event:
        """An event that is set when engines have come since this call."""
        ...
