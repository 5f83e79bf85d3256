"""Defines an engine as an ingress sees it: requests are submitted to it, and outputs come back.

A request on a connection: submit() -> outputs -> an output that is `finished`, after which the iterator ends. The
iterator ends without that output if the request was aborted, or if this engine was the consumer of a request that the
producer finished because token 0 ended it (the consumer then names the request in finished_req_ids). The iterator
raises EngineLost if the session breaks.
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
"""The id and the incarnation of an engine."""


class EngineRole(StrEnum):
    """The part of a request that an engine prefers to do."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    ENCODE = "encode"
    """Engines of this role make the embeddings of images for engines that prefill."""

    @property
    def computes_prompts(self) -> bool:
        """Whether engines of this role prefill requests."""
        return self in (EngineRole.PREFILL, EngineRole.BOTH)

    @property
    def generates(self) -> bool:
        """Whether engines of this role decode requests."""
        return self in (EngineRole.DECODE, EngineRole.BOTH)


_RANK_OF_ROLE: Final = {EngineRole.ENCODE: 0, EngineRole.PREFILL: 1, EngineRole.BOTH: 2, EngineRole.DECODE: 3}
_MAX_ENGINES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineDescriptor:
    """An engine: its name, its incarnation, its role, and how to reach it.

    address:                host:port of the engine's gRPC server, for sessions and for KV control
    further_rank_addresses: host:port for KV control of the tensor-parallel ranks 1, 2, …
    pairing:                the facts that decide with which engines this one can exchange KV; None: they are not known,
                            and only a handshake can decide
    model_version:          the version of the model; engines of two versions never work on the same request
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
        """Return the engine's place in the order of handoffs: by its role, then by the number in its id."""
        number = self.engine_id.rpartition("-")[2]
        return _RANK_OF_ROLE[self.role] * _MAX_ENGINES + (int(number) % _MAX_ENGINES if number.isdecimal() else 0)

    @property
    def kv_address(self) -> EngineAddress:
        """The engine's address for KV transfers, as its peers get it."""
        return EngineAddress(self.engine_id, self.incarnation, self.address, self.further_rank_addresses)


class EngineConnection(Protocol):
    """One ingress's session with one incarnation of one engine."""

    @property
    def descriptor(self) -> EngineDescriptor:
        """The engine at the other end."""
        ...

    @property
    def num_unfinished_requests(self) -> int:
        """How many requests of this ingress the engine has: submitted, and neither finished nor aborted."""
        ...

    def submit(self, request: EngineCoreRequest) -> AsyncIterator[EngineCoreOutput]:
        """Send the request. Returns an iterator over its outputs.

        Requests are sent in the order of the calls. When submit() returns, num_unfinished_requests counts the request,
        even if nobody has asked for an output yet. A broken session raises EngineLost from the iterator, never from
        this call. A caller that stops iterating has to call abort(), which frees the request at the engine.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Let the engine free everything that the request holds; the request's iterator ends.

        Returns at once, and does nothing for a request that is unknown or has ended.
        """
        ...


class EnginePool(Protocol):
    """The engines that an ingress may use."""

    def snapshot(self) -> Sequence[EngineConnection]:
        """Return the engines that serve now: ready, and not draining."""
        ...

    def next_change(self) -> asyncio.Event:
        """Return an event that is set once engines have come after this call."""
        ...
