"""The queues of the requests that compute here, or will."""

from __future__ import annotations

from dataclasses import dataclass

from actors.config import CacheConfig, SchedulerConfig
from actors.core.queue.fair_queue import create_request_queue
from actors.core.queue.lora_slot_queue import LoraSlots
from actors.core.queue.lora_waits import LoraWaits
from actors.core.queue.request_queue import RequestQueue
from actors.core.requests.request import Request, RequestStatus
from actors.core.requests.running_rows import RunningRows


@dataclass(slots=True)
class Queues:
    """The scheduler's queues.

    RemoteKV keeps the requests that wait for another engine, Preparation those that wait for a grammar or an adapter.
    running: requests with status RUNNING
    loaded:  requests with status WAITING whose load is over; they hold all blocks that their next token needs
    waiting: requests with status WAITING or PREEMPTED, without blocks
    waiting_for_lora, loaded_for_lora: like waiting and loaded, but set aside until their adapter has a slot
    lora_waits: how long adapters have waited for a slot, and the loads that are held back for them
    """

    waiting: RequestQueue
    loaded: RequestQueue
    running: RunningRows
    waiting_for_lora: LoraSlots
    loaded_for_lora: LoraSlots
    lora_waits: LoraWaits

    @classmethod
    def create(cls, config: SchedulerConfig, cache_config: CacheConfig) -> Queues:
        """Make empty queues of the configured policy."""
        rows = RunningRows(config.max_num_seqs, cache_config.block_size)
        waits = LoraWaits(config, rows)
        return cls(
            create_request_queue(config),
            create_request_queue(config),
            rows,
            LoraSlots(config, rows, waits, has_blocks=False),
            LoraSlots(config, rows, waits, has_blocks=True),
            waits,
        )

    def remove(self, request: Request) -> None:
        """Remove a request from the queue that it is in, if any."""
        self.lora_waits.end(request)
        _ = (
            self.running.remove(request)
            or self.waiting.remove_request(request)
            or self.loaded.remove_request(request)
            or self.waiting_for_lora.remove(request)
            or self.loaded_for_lora.remove(request)
        )

    def all_loaded(self) -> list[Request]:
        """Return the waiting requests whose load is over, including those whose adapter has no slot."""
        return [*self.loaded, *self.loaded_for_lora]

    def waits(self) -> dict[str, int]:
        """Return how many requests wait for the batch with their KV, and for their adapter's slot in it."""
        return {"batch": len(self.loaded), "adapter_slot": len(self.waiting_for_lora) + len(self.loaded_for_lora)}

    def num_late_prompts(self, arrived_before_s: float) -> int:
        """Return how many prompts are computed or wait, if the next of them arrived before this time; otherwise 0.

        Those behind a late prompt will be late as well, or nearly. Preempted requests are no prompts: they have had
        their first token.
        """
        arrivals_s = self.running.prompt_arrivals_s()
        if len(arrivals_s):
            first_s = arrivals_s.min()
        elif len(self.waiting) and not (first := self.waiting.peek_request()).num_output_tokens:
            first_s = first.arrival_time
        else:
            return 0
        return len(arrivals_s) + len(self.waiting) if first_s < arrived_before_s else 0

    def others_wait(self, request: Request) -> bool:
        """Whether any request other than this one waits to be admitted."""
        is_waiting = request.status is not RequestStatus.RUNNING
        return len(self.waiting) + len(self.loaded) > is_waiting
