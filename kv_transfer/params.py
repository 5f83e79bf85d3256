"""Tickets: the part of a submission that tells an engine its side of a handoff, and its peer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kv_transfer.layout import MAX_TP_SIZE
from kv_transfer.message_ranges import Address, Count, Incarnation, Name, ShortBytes, WireName


class TransferRole(StrEnum):
    """The end of a transfer that an engine is."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """An engine's name, its incarnation, and where its control streams are. Messages of older incarnations are dropped.

    control_address:        host:port of the gRPC server that carries the engine's control streams; with several ranks,
                            rank 0's
    further_rank_addresses: of the tensor-parallel ranks 1, 2, … in order
    """

    engine_id: Name
    incarnation: Incarnation
    control_address: Address
    further_rank_addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_TP_SIZE - 1)] = ()

    @property
    def tp_size(self) -> int:
        """The engine's number of tensor-parallel ranks."""
        return 1 + len(self.further_rank_addresses)

    def of_rank(self, tp_rank: int) -> EngineAddress:
        """Return the address of one rank, under a name of its own: to each other, ranks are engines.

        An engine with one rank has one address, which is returned unchanged.
        """
        if not self.further_rank_addresses:
            return self
        address = self.further_rank_addresses[tp_rank - 1] if tp_rank else self.control_address
        return EngineAddress(f"{self.engine_id}/{tp_rank}", self.incarnation, address)

    def of_all_ranks(self) -> EngineAddress:
        """Return the engine's address, given one that names a rank of the engine and still lists the further ranks.

        control_address stays that of the rank.
        """
        if not self.further_rank_addresses:
            return self
        engine_id, _, _ = self.engine_id.rpartition("/")
        return replace(self, engine_id=engine_id)


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """An engine whose prefix cache probably holds the first num_tokens tokens of a request."""

    peer: EngineAddress
    num_tokens: Count


@dataclass(frozen=True, slots=True)
class HandoffRanks:
    """The handoff ranks of a handoff's two engines. A handoff goes from a lower to a higher rank, or not at all.

    docs/states.md says why.
    """

    producer: Count
    consumer: Count


class TransferPart(msgspec.Struct, frozen=True, array_like=True):
    """The id of the part of a transfer that moves between two ranks; both ends give the part the same id.

    whole: the id of the transfer that this is a part of
    """

    whole: WireName
    producer_rank: Count
    consumer_rank: Count

    def __str__(self) -> str:
        return f"{self.whole} (rank {self.producer_rank} to rank {self.consumer_rank})"


TransferId: TypeAlias = WireName | TransferPart
"""The id of a transfer. The scheduler and the ingress name whole transfers, the ranks name parts."""


@dataclass(frozen=True, slots=True)
class KVTransferParams:
    """One end's ticket for one transfer.

    transfer_id:  the same at both ends, unique for each handoff
    attempt:      the number of the request's submission; messages of another attempt are dropped
    peer:         the engine at the other end
    content_hash: digest of what the KV is computed from: tokens, adapter, images, salt. Each engine fills it in for the
                  request that it has, so that two ends with different requests never hand over; empty: not compared
    ranks:        handoff ranks of both engines, the same at both ends; None: not compared, for transfers whose end no
                  request's blocks wait for, and for canaries, whose deadline ends every wait
    """

    transfer_id: TransferId
    attempt: Count
    role: TransferRole
    peer: EngineAddress
    content_hash: ShortBytes = b""
    ranks: HandoffRanks | None = None
