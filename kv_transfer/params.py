"""The ticket that a request carries into an engine when it takes part in a handoff."""

from dataclasses import dataclass
from enum import StrEnum


class TransferRole(StrEnum):
    """Which end of the handoff the engine that holds this ticket is."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine is, and which life of it: messages of an older incarnation are dropped."""

    engine_id: str
    incarnation: int
    control_address: str
    """host:port of the gRPC server that carries the engine's control streams."""


@dataclass(frozen=True, slots=True)
class KVTransferParams:
    """One end's ticket for one transfer.

    transfer_id: the same at both ends, unique per handoff
    attempt:     new each time the request is submitted again; older attempts' messages are dropped
    peer:        the engine at the other end
    """

    transfer_id: str
    attempt: int
    role: TransferRole
    peer: EngineAddress
