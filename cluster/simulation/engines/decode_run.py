"""Many decode steps of one engine at once, while nothing else is due there.

As long as all that a scheduler has is requests that decode one token a step, and none of them ends, a step changes
little: counters grow, a row whose last block is full gets a block, and a block that was filled gets its name in the
prefix cache. A run does this for k steps, to the same objects and in the same order as k calls of schedule() and
update_from_output() would; tests hold that nothing distinguishes the two. If the last step completes a request, it is
scheduled here, and taken in by update_from_output() itself.

Invariant: num_taken <= num_scheduled <= num_taken + 1. In the middle of a step it is counted as scheduled, and its
tokens have not come.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from actors.core.outputs.scheduler_output import NOTHING_GROWN, SchedulerOutput, StepBatch
from actors.core.scheduler import Scheduler
from actors.costs.step_shape import Floats, Ints, StepShape
from cluster.simulation.engines.counted_tokens import CountedTokens
from cluster.simulation.engines.step_log import StepLog
from cluster.simulation.timing.step_times import StepTimes
from kv_transfer.sides.scheduler_side import SchedulerSide

MIN_STEPS: Final = 2
"""A single step is as quick to take as it always is."""


class DecodeRun:
    """Steps of which the first begins now.

    ends_s: [num_steps] the times at which the steps end
    """

    def __init__(self, scheduler: Scheduler, num_steps: int, begin_s: float, step_times: StepTimes, slowness: float):
        """slowness: the factor by which steps take longer than step_times says"""
        rows = scheduler.running
        self._scheduler = scheduler
        self._rows = rows
        self._begin_s = begin_s
        self._indices: Ints = rows.epochs.nonzero()[0]
        self._epochs = rows.epochs[self._indices]
        num_computed = rows.num_computed[self._indices]
        self._num_decodes = num_decodes = len(self._indices)
        shape = StepShape(num_decodes, num_decodes, int(num_computed.sum()))
        seconds = step_times.decode_run_s(shape, num_steps)
        if slowness != 1.0:
            seconds = slowness * seconds
        # A cumulative sum adds one number after the other, as a clock does.
        self.ends_s: Floats = np.cumsum(np.concatenate(([begin_s], seconds)))[1:]
        self.num_scheduled = self.num_taken = 0
        self._num_steps_to_end = int((rows.max_num_tokens[self._indices] - rows.num_expected[self._indices]).min())
        self._first_step = scheduler.stats.num_steps
        self._changes = self._list_changes(num_computed, num_steps)
        self._num_changes = 0
        self._num_ends_taken = 0
        self._advanced_at_s = -math.inf

    def _list_changes(self, num_computed: Ints, num_steps: int) -> list[tuple[int, bool, int]]:
        """Return what happens to blocks: (step, whether a block is named and not added, row), in order."""
        size = self._scheduler.block_size
        grows_at = self._rows.num_slots[self._indices] - num_computed
        names_at = size - 1 - num_computed % size
        changes: list[tuple[int, bool, int]] = []
        for first_steps, is_name in ((grows_at, False), (names_at, True)):
            for index in (first_steps < num_steps).nonzero()[0].tolist():
                row = int(self._indices[index])
                changes += [(step, is_name, row) for step in range(int(first_steps[index]), num_steps, size)]
        changes.sort()
        return changes

    @property
    def num_steps(self) -> int:
        """Steps of the run."""
        return len(self.ends_s)

    def end_after_step_at(self, now_s: float) -> None:
        """Let the run end with the step that is under way: something else is due."""
        num_over = int(self.ends_s.searchsorted(now_s, side="right"))
        self.ends_s = self.ends_s[: num_over + 1]

    def end_of_step_s(self, now_s: float) -> float:
        """Return when the step ends that is under way."""
        return float(self.ends_s[self._num_over(now_s)])

    def advance_to(self, now_s: float) -> None:
        """Bring the scheduler into the state that it has at this time, in the middle of a step."""
        if now_s == self._advanced_at_s:
            return
        self._advanced_at_s = now_s
        num_over = self._num_over(now_s)
        self._advance(num_over + 1, num_over)

    def _num_over(self, now_s: float) -> int:
        """Return how many steps are over, of those before the last one."""
        return min(int(self.ends_s.searchsorted(now_s, side="right")), self.num_steps - 1)

    def finish(self, now_s: float) -> None:
        """Take in all steps, which end now, but the last one's tokens."""
        self._advance(self.num_steps, self.num_steps - 1)
        ends_s = [*self.ends_s[:-1].tolist(), now_s]
        self._scheduler.remote.prefix_loads.note_steps(self._num_decodes, self._begin_s, ends_s)

    def take_last(self) -> None:
        """Take in the last step's tokens."""
        self._advance(self.num_steps, self.num_steps)

    @property
    def completes_one(self) -> bool:
        """Whether the last step completes a request, if that was not ended meanwhile."""
        return self.num_steps >= self._num_steps_to_end

    def last_step(self) -> SchedulerOutput:
        """Return the last step as schedule() would have; to be called after finish(), in place of take_last()."""
        rows = self._rows
        is_live = rows.epochs[self._indices] == self._epochs
        indices = self._indices[is_live]
        batch = StepBatch(
            req_ids=rows.req_ids[indices].tolist(),
            rows=indices,
            epochs=self._epochs[is_live],
            num_plain=len(indices),
            num_new_tokens=np.ones(len(indices), dtype=np.int64),
            num_computed_tokens=rows.num_computed[indices] - 1,
            num_output_tokens=rows.num_expected[indices] - rows.num_prompt[indices],
            grown=NOTHING_GROWN,
        )
        return SchedulerOutput(batch, [], set(), step_index=self._first_step + self.num_steps)

    def take_ends(self) -> Floats:
        """Return the ends of the steps whose tokens were taken in since the last call."""
        first, self._num_ends_taken = self._num_ends_taken, self.num_taken
        return self.ends_s[first : self.num_taken]

    def free_step(self) -> int:
        """Return the number of the newest step that is over, as the scheduler counts steps."""
        return self._first_step + self.num_taken

    def _advance(self, num_scheduled: int, num_taken: int) -> None:
        rows, scheduler = self._rows, self._scheduler
        num_new_steps, num_new_tokens = num_scheduled - self.num_scheduled, num_taken - self.num_taken
        if not num_new_steps and not num_new_tokens:
            return
        is_live = rows.epochs[self._indices] == self._epochs
        if not is_live.all():
            self._indices, self._epochs = self._indices[is_live], self._epochs[is_live]
        rows.num_computed[self._indices] += num_new_steps
        rows.num_expected[self._indices] += num_new_tokens
        if num_new_tokens:
            for tokens in rows.token_lists[self._indices].tolist():
                assert isinstance(tokens, CountedTokens), "simulated requests have counted tokens"
                tokens.grow(num_new_tokens)
        self._change_blocks(num_scheduled, num_taken)
        self.num_scheduled, self.num_taken = num_scheduled, num_taken
        scheduler.stats.num_output_tokens += num_new_tokens * len(self._indices)
        scheduler.stats.num_steps = self._first_step + num_scheduled
        scheduler.kv_cache_manager.begin_step(self._first_step + num_scheduled)
        scheduler.kv_cache_manager.end_step(self._first_step + num_taken)

    def _change_blocks(self, num_scheduled: int, num_taken: int) -> None:
        rows, kv = self._rows, self._scheduler.kv_cache_manager
        while self._num_changes < len(self._changes):
            step, is_name, row = self._changes[self._num_changes]
            if step >= (num_taken if is_name else num_scheduled):
                break
            self._num_changes += 1
            request = rows.requests[row]
            if request is None:
                continue
            if is_name:
                # Of the row's tokens only those up to this step's are computed for good.
                num_final_tokens = int(rows.num_computed[row]) - (num_scheduled - step - 1)
                kv.cache_blocks(request, num_final_tokens)
            else:
                kv.grow(request.request_id)
                rows.num_slots[row] += self._scheduler.block_size


def has_work(scheduler: Scheduler, connector: SchedulerSide, now_s: float) -> bool:
    """Return whether schedule() has anything to do. If not, it would return an empty step, and change nothing.

    connector: the scheduler's
    """
    remote = scheduler.remote
    # Requests that wait for other engines are in no queue.
    if len(scheduler.requests) > len(remote.loading) + len(remote.blocked_producers):
        return True
    if scheduler.finished_req_ids or connector.has_news or remote.embeddings or remote.prefix_loads.has_orders:
        return True
    deadline_s = scheduler.next_deadline()
    return deadline_s is not None and deadline_s <= now_s


def num_free_steps(scheduler: Scheduler, connector: SchedulerSide, log: StepLog, max_steps: int) -> int:
    """Return how many steps can be taken at once from now on; 0 if something else than steady decodes is due.

    connector: the scheduler's; log: in which the requests are open whose clients know that they decode
    """
    rows, remote = scheduler.running, scheduler.remote
    if not len(rows) or scheduler.waiting or scheduler.loaded or remote.blocked_consumers or connector.has_news:
        return 0
    if remote.prefix_loads.has_orders:
        return 0
    indices = rows.epochs.nonzero()[0]
    num_computed, num_expected = rows.num_computed[indices], rows.num_expected[indices]
    decodes = (num_expected - num_computed == 1) & (num_computed >= rows.num_prompt[indices]) & rows.is_plain[indices]
    if not decodes.all() or not log.all_open(rows.req_ids[indices].tolist()):
        return 0
    # The last of these steps completes a request.
    num_steps = min(int((rows.max_num_tokens[indices] - num_expected).min()), max_steps)
    if num_steps < MIN_STEPS:
        return 0
    size = scheduler.block_size
    num_grown = -(-np.maximum(num_computed + num_steps - rows.num_slots[indices], 0) // size)
    return num_steps if int(num_grown.sum()) <= scheduler.kv_cache_manager.block_pool.num_free_blocks else 0
