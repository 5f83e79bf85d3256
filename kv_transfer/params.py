"""The ticket that a request carries into an engine when it takes part in a handoff."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from kv_transfer.layout import MAX_TP_SIZE
from kv_transfer.ranges import Address, Count, Incarnation, Name, ShortBytes, WireName


class TransferRole(StrEnum):
    """Which end of the handoff the engine that holds this ticket is."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine is, and which life of it: messages of an older incarnation are dropped.

    further_rank_addresses: of its tensor-parallel ranks 1, 2, … in order; control_address is rank 0's
    """

    engine_id: Name
    incarnation: Incarnation
    control_address: Address
    """host:port of the gRPC server that carries the engine's control streams."""
    further_rank_addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_TP_SIZE - 1)] = ()

    @property
    def tp_size(self) -> int:
        """Its number of ranks."""
        return 1 + len(self.further_rank_addresses)

    def of_rank(self, tp_rank: int) -> EngineAddress:
        """One rank's own address, to whom it is an engine of its own; the only rank's is the engine's."""
        if not self.further_rank_addresses:
            return self
        address = self.further_rank_addresses[tp_rank - 1] if tp_rank else self.control_address
        return EngineAddress(f"{self.engine_id}/{tp_rank}", self.incarnation, address)

    def of_all_ranks(self) -> EngineAddress:
        """The engine's address again, of one that names one of its ranks, but of_rank(0)'s address is this one's."""
        if not self.further_rank_addresses:
            return self
        engine_id, _, _ = self.engine_id.rpartition("/")
        return replace(self, engine_id=engine_id)


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """An engine whose cache is thought to hold the first so many tokens of a request."""

    peer: EngineAddress
    num_tokens: Count


@dataclass(frozen=True, slots=True)
class HandoffRanks:
    """The ranks of a handoff's two engines; it goes from a lower to a higher one, or not at all."""

    producer: Count
    consumer: Count


@dataclass(frozen=True, slots=True)
class KVTransferParams:
    """One end's ticket for one transfer.

    transfer_id:  the same at both ends, unique per handoff
    attempt:      new each time the request is submitted again; older attempts' messages are dropped
    peer:         the engine at the other end
    content_hash: names what the KV is of: tokens, adapter, images, salt. The engine fills it in by what it has got, so
                  that two ends which differ never hand over; empty: not compared
    ranks:        of both engines, the same at both ends; None: not compared, for transfers that no blocks wait for
    """

    transfer_id: WireName
    attempt: Count
    role: TransferRole
    peer: EngineAddress
    content_hash: ShortBytes = b""
    ranks: HandoffRanks | None = None
