"""Samples of prompts that come, end and lose their blocks at any time: what they copy is right when it is copied."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.config import EngineRoleName
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.request import FinishReason, Request, RequestStatus
from tests.actors.core.arrivals import CHUNK_BOUNDS
from tests.actors.core.builders import make_request, make_scheduler
from tests.actors.core.chunk_bounds import ROLES, ChunkBound
from tests.actors.core.fakes import Driver, reference_tokens


class SampleMachine(RuleBasedStateMachine):
    """One engine; steps are scheduled ahead, and executed as late as can be."""

    @initialize(
        num_blocks=st.integers(5, 24),
        max_num_seqs=st.integers(2, 6),
        budget=st.integers(3, 24),
        chunked=st.booleans(),
        overlap=st.booleans(),
        num_lookahead=st.sampled_from([0, 0, 3]),
        watermark=st.sampled_from([0.0, 0.1]),
        bound=CHUNK_BOUNDS,
    )
    def start(
        self,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        chunked: bool,
        overlap: bool,
        num_lookahead: int,
        watermark: float,
        bound: ChunkBound,
    ) -> None:
        self.scheduler = make_scheduler(
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(budget, max_num_seqs),
            enable_chunked_prefill=chunked,
            overlap=overlap,
            num_lookahead_tokens=num_lookahead,
            watermark=watermark,
        )
        bound.apply(self.scheduler)
        self.driver = Driver(self.scheduler)
        self.max_in_flight = 2 if overlap else 1
        self.in_flight: deque[SchedulerOutput] = deque()
        self.submitted: dict[str, Request] = {}
        self.aborted: set[str] = set()

    @rule(num_tokens=st.integers(1, 14), max_tokens=st.integers(1, 12), salt=st.sampled_from([None, None, "s"]))
    def lead(self, num_tokens: int, max_tokens: int, salt: str | None) -> None:
        """Prompts begin alike, so that some end in the middle of what others have computed."""
        self._submit(list(range(1, num_tokens + 1)), max_tokens, salt, 0)

    @precondition(lambda self: self.scheduler.running)
    @rule(
        data=st.data(),
        num_samples=st.integers(1, 4),
        max_tokens=st.integers(1, 12),
        num_resumed=st.sampled_from([0, 0, 1, 5]),
        other_salt=st.sampled_from([False, False, True]),
    )
    def follow(
        self, data: st.DataObject, num_samples: int, max_tokens: int, num_resumed: int, other_salt: bool
    ) -> None:
        leader = data.draw(st.sampled_from(list(self.scheduler.running)))
        salt = "other" if other_salt else leader.cache_salt
        for _ in range(num_samples):
            self._submit(leader.prompt_token_ids, max_tokens, salt, num_resumed)

    def _submit(self, prompt: list[int], max_tokens: int, salt: str | None, num_resumed: int) -> None:
        request = make_request(
            f"r{len(self.submitted)}",
            prompt,
            max_tokens=max_tokens,
            cache_salt=salt,
            output_token_ids=reference_tokens(prompt, min(num_resumed, max_tokens)),
        )
        self.submitted[request.request_id] = request
        self.scheduler.add_request(request)

    @rule(role=st.sampled_from(ROLES))
    def role_is_switched(self, role: EngineRoleName) -> None:
        self.scheduler.chunk_budget.set_role(role)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A leader too, between the step that copies its block being scheduled and being executed."""
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        self.aborted.add(request_id)
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @precondition(lambda self: len(self.in_flight) < self.max_in_flight)
    @rule()
    def schedule(self) -> None:
        self.in_flight.append(self.scheduler.schedule())

    @precondition(lambda self: self.in_flight)
    @rule()
    def update(self) -> None:
        output = self.in_flight.popleft()
        model_output = self.driver.worker.execute(output)
        for client in self.scheduler.update_from_output(output, model_output).values():
            self.driver.outputs += client.outputs

    @rule(num_steps=st.integers(1, 4))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while len(self.in_flight) < self.max_in_flight:
                self.schedule()
            self.update()

    @invariant()
    def blocks_agree(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(60 * (len(self.submitted) + 1)):
            if not self.scheduler.has_requests():
                break
            self.run(1)
            self.blocks_agree()
        while self.in_flight:
            self.update()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.num_free_blocks == pool.num_blocks
        for request_id, request in self.submitted.items():
            right = reference_tokens(request.prompt_token_ids, request.max_tokens)
            if request_id not in self.aborted and self._end_of(request_id) is not FinishReason.ERROR:
                assert request.output_token_ids == right
            assert request.output_token_ids == right[: request.num_output_tokens]

    def _end_of(self, request_id: str) -> FinishReason | None:
        """ERROR for one that the engine is too small for."""
        return self.driver.end_of(request_id).finish_reason


TestSamples = SampleMachine.TestCase
_SETTINGS = settings(stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
TestSamples.settings = settings(_SETTINGS, max_examples=100)


class SampleMachineAtLength(SampleMachine):
    """The same, for long."""


TestSamplesAtLength = pytest.mark.timeout(7200)(pytest.mark.long(SampleMachineAtLength.TestCase))
TestSamplesAtLength.settings = settings(_SETTINGS, max_examples=20_000)
