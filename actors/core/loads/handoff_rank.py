"""Handoffs go from a lower to a higher rank only, so that engines never wait for each other in a circle.

A ticket carries the ranks of both ends, as the controller has given them. The engine's own rank is the one of the
transfers that it has; it changes only while there is none. So at any time all transfers of an engine have its rank, and
every load waits for an engine of a lower one: the lowest has no loads, so what it produces ends, and then the loads of
the engines that it produces for, and so on up.
"""

from __future__ import annotations

from collections.abc import Mapping

from actors.core.requests.request import Request
from kv_transfer.params import HandoffRanks, TransferRole


class HandoffRank:
    """This engine's rank. requests: all unfinished ones, by id; held: finished ones that links still use."""

    def __init__(self, requests: Mapping[str, Request], held: Mapping[str, Request]) -> None:
        self.num_refused = 0
        self._requests = requests
        self._held = held
        self._own = 0

    def find_objection(self, request: Request) -> str | None:
        """Say why a request that has just come must not take part in the handoff of its ticket, or return None."""
        ticket = request.kv_transfer_params
        if ticket is None or ticket.ranks is None:
            return None
        objection = self._find_objection(ticket.ranks, ticket.role)
        self.num_refused += objection is not None
        return objection

    def _find_objection(self, ranks: HandoffRanks, role: TransferRole) -> str | None:
        if ranks.producer >= ranks.consumer:
            return f"handoffs go to a higher rank only, and this one goes from {ranks.producer} to {ranks.consumer}"
        own = ranks.consumer if role is TransferRole.CONSUMER else ranks.producer
        if own != self._own:
            if self._held or any(request.transfer_role is not None for request in self._requests.values()):
                return f"this engine has handoff rank {self._own} until its transfers are over, the ticket says {own}"
            self._own = own
        return None
