"""The report of an engine, before it loads its model, about the orders of keys that suit the attention on its node.

The controller collects the reports of the engines that start, and chooses one order for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OrderOffer:
    """An order of keys that one attention backend of the engine's node reads and writes.

    backend:   the backend's name
    key_order: a KeyOrder
    rank:      0 for the fastest backend of all that exist, 1 for the next one, and so on
    """

    backend: str
    key_order: str
    rank: int


@dataclass(frozen=True, slots=True)
class AttentionReport:
    """The offers of one engine.

    offers: the fastest first; empty if the checkpoint cannot be read, a fault that the engine's start reports
    obstacles: for each backend that cannot serve the model on this node, its name and the reason
    """

    offers: tuple[OrderOffer, ...]
    obstacles: tuple[str, ...] = ()
