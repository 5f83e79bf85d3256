"""Finds prefixes that a load is bringing for one request, so that others with the same prefix wait for it.

Requests with a common prefix often come together. Without this, a request whose prefix is on its way here for another
one, by a handoff or a fetch, would compute that prefix anew. It waits instead, and requests behind it pass it, while

- the load is under way,
- the engine has other prompts to compute, or has had none for no longer than computing the prefix would take, and
- it has waited no longer, since its turn came, than computing the prefix would delay all prompts that wait, summed.

Both bounds are the rule for the ski-rental problem (Karlin, Manasse, Rudolph, Sleator, 1988): who waits until the wait
has cost as much as what it may save, the engine's time in the first case and that of the requests in the second, loses
at most twice the least possible.

No circle of waits comes of it. A load ends without this engine's waiting requests: it is the answer to a fetch, which
waits for nothing, or a handoff from an engine of a lower handoff rank, or it ends at its deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from actors.core.requests.block_hash import BlockHash
from actors.core.requests.request import PrefixWait, Request

MAX_WAITING: Final = 64
"""The most requests that wait in one step: each is taken out of its queue and put back."""


class ArrivingPrefixes:
    """The prefixes that are on their way to one engine; only the engine thread may call it."""

    def __init__(
        self,
        loading: Mapping[str, Request],
        num_blocks_of: Callable[[Request], int],
        block_size: int,
        compute_s: Callable[[int], float | None],
    ) -> None:
        """Find nothing yet.

        loading:       the requests whose loads are under way, by id
        num_blocks_of: returns how many whole blocks of its prompt a loading request will have after its load
        compute_s:     returns the seconds in which this engine computes so many tokens; None if that is not known
        """
        self._loading = loading
        self._num_blocks_of = num_blocks_of
        self._block_size = block_size
        self._compute_s = compute_s
        self.num_waiting = 0
        """How many requests the newest step left waiting for a prefix."""
        self._without_prompts_since_s: float | None = None
        """Since when the engine has had no prompt to compute but those that wait here."""
        self._soonest_s = 0.0
        """The least seconds that computing a prefix takes for which a request waits."""

    def begin_step(self) -> None:
        """Count anew, as a step is put together, how many requests wait."""
        self.num_waiting = 0
        self._soonest_s = math.inf

    def goes_on_waiting(self, request: Request, num_in_queue: int, now_s: float) -> bool:
        """Return whether a request that waited before should do so in this step, too. Its prefix is not looked up.

        num_in_queue: the requests that wait for their turn, this one included
        """
        wait = request.prefix_wait
        return wait is not None and wait.load_id in self._loading and self._add(wait, num_in_queue, now_s)

    def begins_to_wait(self, request: Request, num_hit_blocks: int, num_in_queue: int, now_s: float) -> bool:
        """Return whether a request whose turn has come should wait for a prefix on its way.

        num_hit_blocks: of its prompt, cached here
        num_in_queue:   the requests that wait for their turn, this one included
        """
        load_id, num_tokens = self._find(request, num_hit_blocks)
        if not num_tokens or not (compute_s := self._compute_s(num_tokens)):
            return False
        since_s = now_s if request.prefix_wait is None else request.prefix_wait.since_s
        wait = request.prefix_wait = PrefixWait(load_id, compute_s, since_s)
        return self._add(wait, num_in_queue, now_s)

    def _add(self, wait: PrefixWait, num_in_queue: int, now_s: float) -> bool:
        """Let a request wait in this step if it may."""
        idle_since_s = now_s if self._without_prompts_since_s is None else self._without_prompts_since_s
        # The first of the two has to be over at next_deadline(), whatever its sum is rounded to.
        if now_s >= idle_since_s + wait.compute_s or now_s >= wait.since_s + wait.compute_s * num_in_queue:
            return False
        if self.num_waiting >= MAX_WAITING:
            return False
        self.num_waiting += 1
        self._soonest_s = min(self._soonest_s, wait.compute_s)
        return True

    def end_step(self, now_s: float, *, has_prompts: bool) -> None:
        """Note whether the step computes any part of a prompt."""
        if has_prompts or not self.num_waiting:
            self._without_prompts_since_s = None
        elif self._without_prompts_since_s is None:
            self._without_prompts_since_s = now_s

    def next_deadline(self) -> float | None:
        """Return when a request has waited long enough, in seconds by the engine's clock; None if none waits idly."""
        return None if self._without_prompts_since_s is None else self._without_prompts_since_s + self._soonest_s

    def _find(self, request: Request, num_hit_blocks: int) -> tuple[str, int]:
        """Return the load that brings most behind a request's hit, and the tokens; 0 if none brings any.

        At least one token of a prompt is computed, for its logits.
        """
        hashes = request.block_hashes
        end = min((request.num_tokens - 1) // self._block_size, len(hashes))
        load_id, most = "", num_hit_blocks
        for other_id, other in self._loading.items() if num_hit_blocks < end else ():
            there = min(self._num_blocks_of(other), len(other.block_hashes), end)
            # A block's hash is that of all tokens up to its end.
            if there > most and other.block_hashes[most] == hashes[most]:
                load_id, most = other_id, _num_common(hashes, other.block_hashes, most + 1, there)
        return load_id, (most - num_hit_blocks) * self._block_size


def _num_common(one: Sequence[BlockHash], other: Sequence[BlockHash], least: int, most: int) -> int:
    """Return how many first blocks are the same in both; at least `least` are, and at most `most`."""
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if one[middle - 1] == other[middle - 1] else (least, middle - 1)
    return least
