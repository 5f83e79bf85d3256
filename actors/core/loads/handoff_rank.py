"""Handoffs go from a lower to a higher rank only, so that engines never wait for each other in a circle.

The controller gives each engine a rank, and a ticket carries the ranks of both ends. An engine takes its own rank from
its transfers, and changes its rank only while it has none. So at any time all transfers of an engine have the same
rank, and each load waits for an engine with a lower rank. The engine with the lowest rank has no loads, so its
transfers come to their end; then the loads of the engines that receive them are over; and so on upwards.
"""

from __future__ import annotations

from collections.abc import Mapping

from actors.core.requests.request import Request
from kv_transfer.params import HandoffRanks, TransferRole


class HandoffRank:
    """This engine's handoff rank, and the check of the ranks in tickets."""

    def __init__(self, requests: Mapping[str, Request], held: Mapping[str, Request]) -> None:
        self.num_refused = 0
        self._requests = requests
        self._held = held
        self._own = 0

    def find_objection(self, request: Request) -> str | None:
        """Return why a request that has just come must not take part in the handoff of its ticket, or None."""
        ticket = request.kv_transfer_params
        if ticket is None or ticket.ranks is None:
            return None
        objection = self._find_objection(ticket.ranks, ticket.role)
        self.num_refused += objection is not None
        return objection

    def _find_objection(self, ranks: HandoffRanks, role: TransferRole) -> str | None:
        if ranks.producer >= ranks.consumer:
            return f"a handoff has to go to a higher rank, and this one goes from {ranks.producer} to {ranks.consumer}"
        own = ranks.consumer if role is TransferRole.CONSUMER else ranks.producer
        if own != self._own:
            if self._held or any(request.transfer_role is not None for request in self._requests.values()):
                return f"this engine has handoff rank {self._own} until its transfers end, but the ticket says {own}"
            self._own = own
        return None
