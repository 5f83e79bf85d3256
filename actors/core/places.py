"""Where the requests are that compute here, or will."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from actors.core.request import Request, RequestStatus
from actors.core.request_queue import RequestQueue, create_request_queue


@dataclass(slots=True)
class Places:
    """The scheduler's queues. RemoteKV has those of the requests that wait for a peer.

    running: RUNNING, by id, in the order of admission
    holding: WAITING, with all the blocks that the next token needs: their load is over
    waiting: WAITING or PREEMPTED, without blocks
    """

    waiting: RequestQueue
    holding: RequestQueue
    running: dict[str, Request] = field(default_factory=dict)

    @classmethod
    def create(cls, policy: Literal["fcfs", "priority"]) -> Places:
        """Make empty queues of the configured policy."""
        return cls(create_request_queue(policy), create_request_queue(policy))

    def remove(self, request: Request) -> None:
        """Take a request out of the place where it is, if it is in any."""
        if self.running.pop(request.request_id, None) is None and not self.waiting.remove_request(request):
            self.holding.remove_request(request)

    def others_wait(self, request: Request) -> bool:
        """Whether any other request waits for its turn."""
        is_waiting = request.status is not RequestStatus.RUNNING
        return len(self.waiting) + len(self.holding) > is_waiting
