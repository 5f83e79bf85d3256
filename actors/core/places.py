"""Where the requests are that compute here, or will."""

from __future__ import annotations

from dataclasses import dataclass

from actors.config import CacheConfig, SchedulerConfig
from actors.core.request import Request, RequestStatus
from actors.core.request_queue import RequestQueue, create_request_queue
from actors.core.running_rows import RunningRows


@dataclass(slots=True)
class Places:
    """The scheduler's queues. RemoteKV has those of the requests that wait for a peer.

    running: RUNNING
    holding: WAITING, with all the blocks that the next token needs: their load is over
    waiting: WAITING or PREEMPTED, without blocks
    """

    waiting: RequestQueue
    holding: RequestQueue
    running: RunningRows

    @classmethod
    def create(cls, config: SchedulerConfig, cache_config: CacheConfig) -> Places:
        """Make empty queues of the configured policy."""
        rows = RunningRows(config.max_num_seqs, cache_config.block_size)
        return cls(create_request_queue(config.policy), create_request_queue(config.policy), rows)

    def remove(self, request: Request) -> None:
        """Take a request out of the place where it is, if it is in any."""
        if not self.running.remove(request) and not self.waiting.remove_request(request):
            self.holding.remove_request(request)

    def others_wait(self, request: Request) -> bool:
        """Whether any other request waits for its turn."""
        is_waiting = request.status is not RequestStatus.RUNNING
        return len(self.waiting) + len(self.holding) > is_waiting
