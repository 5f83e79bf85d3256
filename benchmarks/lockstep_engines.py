"""Runs several of raypd's schedulers in virtual time as engines that take their steps together.

vLLM's data-parallel engines of a mixture of experts do so: each has its own requests, and all of them share the
experts, so that every layer ends for all of them at once. An engine without requests computes along with one token.
raypd's own engines are independent of each other, so its simulator has no such engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from actors.config import CacheConfig, SchedulerConfig
from actors.core.outputs.model_runner_output import NO_TOKEN, ModelRunnerOutput
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.block_hash import PUBLIC_KEY, BlockHasher
from actors.core.requests.request import EngineCoreRequest, Request
from actors.core.requests.sampling_params import SamplingParams
from actors.core.scheduler import Scheduler
from actors.costs.step_shape import StepShape
from cluster.simulation.timing.op_tables import OpTables
from cluster.simulation.workloads.workload_request import WorkloadRequest

_TOKEN: Final = 0
_IDLE: Final = StepShape(num_tokens=1, num_decodes=1, num_decode_context=1)
_WAITING_WEIGHT: Final = 4
"""How much more than a running request a waiting one counts when vLLM chooses the least loaded engine."""


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """When a request got its first and its last token, in seconds from the beginning of the workload."""

    first_s: float
    last_s: float


def run_in_lockstep(
    workload: Sequence[WorkloadRequest],
    tables: OpTables,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    num_blocks: int,
    max_model_len: int,
) -> list[TokenTimes]:
    """Serve a workload, and return when each request got its tokens, in the workload's order.

    num_blocks: blocks of the KV cache of each engine
    Raises ValueError if an engine refuses a request.
    """
    group = _Group(workload, tables, scheduler, cache, num_blocks, max_model_len)
    while group.advance():
        pass
    return [TokenTimes(group.first_s[request.request_id], group.last_s[request.request_id]) for request in workload]


@dataclass(frozen=True, slots=True)
class _GroupStep:
    outputs: list[SchedulerOutput]
    end_s: float


class _Group:
    """Invariant: at most two steps are under way with overlap, and one without."""

    def __init__(
        self,
        workload: Sequence[WorkloadRequest],
        tables: OpTables,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        num_blocks: int,
        max_model_len: int,
    ) -> None:
        self._now_s = 0.0
        self._engines = [
            Scheduler(scheduler, cache, num_blocks, max_model_len, clock=lambda: self._now_s)
            for _ in range(tables.layout.data_parallel_size)
        ]
        self._tables = tables
        self._workload, self._num_arrived = workload, 0
        self._hasher = BlockHasher(cache.block_size, PUBLIC_KEY)
        self._under_way: deque[_GroupStep] = deque()
        self._free_s = 0.0
        self._max_under_way = 1 + int(bool(scheduler.overlap))
        self._num_prompt_tokens = {request.request_id: request.num_prompt_tokens for request in workload}
        self.first_s: dict[str, float] = {}
        self.last_s: dict[str, float] = {}

    def advance(self) -> bool:
        """Start a step, or take one in, or go to the next arrival. Returns whether there was anything to do."""
        self._take_arrivals()
        outputs = [engine.schedule() for engine in self._engines]
        is_empty = not any(output.total_num_scheduled_tokens for output in outputs)
        if not is_empty:
            shapes = [_shape_of(output) if output.total_num_scheduled_tokens else _IDLE for output in outputs]
            self._free_s = max(self._now_s, self._free_s) + self._tables.lockstep_s(shapes)
            self._under_way.append(_GroupStep(outputs, self._free_s))
            if len(self._under_way) < self._max_under_way:
                return True
        if self._under_way:
            self._take_in(self._under_way.popleft())
            return True
        if self._num_arrived == len(self._workload):
            return False
        self._now_s = max(self._now_s, self._workload[self._num_arrived].arrival_s)
        return True

    def _take_arrivals(self) -> None:
        while self._num_arrived < len(self._workload):
            request = self._workload[self._num_arrived]
            if request.arrival_s > self._now_s:
                return
            self._num_arrived += 1
            engine = min(self._engines, key=_load_of)
            message = EngineCoreRequest(
                request_id=request.request_id,
                # A token of its own: no two requests share a prefix.
                prompt_token_ids=[self._num_arrived] * request.num_prompt_tokens,
                sampling_params=SamplingParams(temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True),
                arrival_time_s=request.arrival_s,
            )
            engine.add_request(Request.from_engine_core_request(message, 0, self._hasher, now_s=self._now_s))
            if request.request_id not in engine.requests:
                raise ValueError(f"{request.request_id}: the engine refuses {request.num_prompt_tokens} tokens")

    def _take_in(self, step: _GroupStep) -> None:
        self._now_s = max(self._now_s, step.end_s)
        self._take_arrivals()
        for engine, output in zip(self._engines, step.outputs, strict=True):
            if not output.total_num_scheduled_tokens:
                continue
            batch = output.batch
            num_prompt_tokens = np.array([self._num_prompt_tokens[name] for name in batch.req_ids], dtype=np.int64)
            num_computed = batch.num_computed_tokens + batch.num_new_tokens
            is_sampled = num_computed >= num_prompt_tokens + batch.num_output_tokens
            tokens = np.where(is_sampled, _TOKEN, NO_TOKEN)[:, None]
            engine.update_from_output(output, ModelRunnerOutput(batch.req_ids, tokens))
            for name in batch.req_ids:
                request = engine.requests.get(name)
                if request is None:
                    self.last_s.setdefault(name, self._now_s)
                if request is None or request.num_output_tokens:
                    self.first_s.setdefault(name, self._now_s)


def _shape_of(output: SchedulerOutput) -> StepShape:
    return StepShape.of_batch(output.batch.num_new_tokens, output.batch.num_computed_tokens)


def _load_of(engine: Scheduler) -> int:
    num_running, num_waiting = engine.get_request_counts()
    return _WAITING_WEIGHT * num_waiting + num_running
