"""The life of a step: what comes in while one runs, what goes out, and when the engine may sleep.

Tests of actors/executor.py, actors/model_facts.py, actors/worker.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from actors.core.outputs.model_runner_output import ModelRunnerOutput
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.block_hash import PUBLIC_KEY
from actors.core.requests.multimodal import EncoderInput, PackedArray
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.costs.step_cost_model import Residuals, StepCostModel
from actors.costs.step_shape import NUM_FEATURES, StepShape
from actors.engine_core import EngineCore
from actors.executor import InProcessExecutor, RunningStep
from actors.model.launched_step import KnownStep
from actors.model_facts import ModelFacts
from actors.worker import Worker, WorkerStep
from tests.actors.core.builders import Clock, make_scheduler
from tests.actors.core.fakes import FakeWorker, reference_tokens

PROMPT = [1, 2, 3, 4, 5]


@dataclass
class LateStep:
    """Is executed when its result is asked for, as late as can be."""

    executor: FakeExecutor
    output: SchedulerOutput

    def result(self) -> ModelRunnerOutput:
        self.executor.while_it_runs()
        output = self.executor.worker.execute(self.output)
        output.is_replayed = self.executor.replays
        return output


@dataclass
class FakeExecutor:
    worker: FakeWorker = field(default_factory=lambda: FakeWorker(64, 4))
    started: list[SchedulerOutput] = field(default_factory=list)
    while_it_runs: Callable[[], None] = lambda: None
    replays: bool = False

    @property
    def facts(self) -> ModelFacts:
        raise AssertionError("nobody asks")

    def start(self, scheduler_output: SchedulerOutput) -> RunningStep:
        self.started.append(scheduler_output)
        return LateStep(self, scheduler_output)

    def encode(self, image: EncoderInput) -> PackedArray:
        raise AssertionError("nobody asks")

    def take_other_pages(self) -> None:
        raise AssertionError("nobody asks")

    def shutdown(self) -> None:
        pass


def request(request_id: str, max_tokens: int = 3) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id, prompt_token_ids=PROMPT, sampling_params=SamplingParams(max_tokens=max_tokens)
    )


def make_core(*, overlap: bool) -> tuple[EngineCore, FakeExecutor]:
    executor = FakeExecutor()
    return EngineCore(make_scheduler(overlap=overlap), executor, Clock(), hash_key=PUBLIC_KEY), executor


def run(core: EngineCore, max_steps: int = 50) -> list[tuple[str, list[int]]]:
    """Step until the engine is idle; what each output brought."""
    brought = []
    for _ in range(max_steps):
        result = core.step()
        brought += [(o.request_id, o.new_token_ids) for client in result.outputs.values() for o in client.outputs]
        if result.is_idle:
            return brought
    raise AssertionError("never idle")


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_come_one_by_one_and_then_the_engine_is_idle(overlap: bool) -> None:
    core, _ = make_core(overlap=overlap)
    core.submit(request("a"))
    right = reference_tokens(PROMPT, 3, eos=-1)
    assert run(core) == [("a", [token_id]) for token_id in right]
    assert not core.scheduler.has_requests()
    pool = core.scheduler.kv_cache_manager.block_pool
    assert pool.num_free_blocks == pool.num_blocks


@pytest.mark.parametrize(("replays", "expected"), [(False, 0), (True, 3)])
def test_steps_that_replayed_a_graph_are_counted(replays: bool, expected: int) -> None:
    core, executor = make_core(overlap=False)
    executor.replays = replays
    core.submit(request("a"))
    for _ in range(3):
        core.step()
    stats = core.make_stats()
    assert (stats.num_steps, stats.num_replayed_steps) == (3, expected)


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_are_observed_with_the_time_since_the_step_before(overlap: bool) -> None:
    clock, executor = Clock(), FakeExecutor()
    core = EngineCore(make_scheduler(overlap=overlap), executor, clock, hash_key=PUBLIC_KEY)

    def pass_time() -> None:
        clock.now_s += 0.25

    executor.while_it_runs = pass_time
    core.submit(request("a", 40))
    run(core, 80)
    costs, steps = core.make_stats().step_costs, core.make_stats().step_stats
    assert costs is not None
    assert steps is not None
    assert steps.num_tokens == len(PROMPT) + 39
    assert (sum(steps.num_by_duration), sum(steps.num_by_size)) == (40, 40)
    assert {one.kind: one.num_steps for one in costs.residuals} == {"decode": 38, "prefill": 0, "mixed": 0}
    assert costs.seconds(StepShape(1, 1, 20)) == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_report_says_when_the_step_under_way_ends_whose_tokens_it_counts_as_computed(overlap: bool) -> None:
    clock, executor = Clock(), FakeExecutor()
    core = EngineCore(make_scheduler(overlap=overlap), executor, clock, hash_key=PUBLIC_KEY)
    costs = StepCostModel((1e-3,) * NUM_FEATURES, (Residuals("decode", 1000),))
    core._step_costs.model = lambda: costs  # type: ignore[method-assign]  # for this one core
    core.submit(request("a", 40))
    core.step()
    clock.now_s += 0.001
    load = core.make_stats().load_report
    assert load is not None
    assert load.num_waiting_tokens + load.num_prefill_tokens == 0
    expected_s = costs.seconds(StepShape.of_batch(np.array([len(PROMPT)]), np.array([0]))) - 0.001
    assert expected_s > 0
    assert load.describes_in_s == (pytest.approx(expected_s) if overlap else 0.0)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_time_between_two_steps_is_part_of_the_second_one_unless_the_engine_was_idle(overlap: bool) -> None:
    clock, executor = Clock(), FakeExecutor()
    core = EngineCore(make_scheduler(overlap=overlap), executor, clock, hash_key=PUBLIC_KEY)

    def pass_time() -> None:
        clock.now_s += 0.25

    executor.while_it_runs = pass_time

    def run_with_pauses() -> tuple[int, float]:
        """Run a request's steps, with a pause between two of them, and return their number and their seconds."""
        before = core.make_stats().step_stats
        assert before is not None
        core.submit(request(f"after {clock.now_s}", 5))
        while not core.step().is_idle:
            clock.now_s += 0.125
        after = core.make_stats().step_stats
        assert after is not None
        return sum(after.num_by_duration) - sum(before.num_by_duration), after.duration_s - before.duration_s

    began_s = clock.now_s
    num_steps, seconds = run_with_pauses()
    assert num_steps == 5
    assert seconds > 5 * 0.25 + 3 * 0.125
    assert seconds <= clock.now_s - began_s
    clock.now_s += 100.0
    assert run_with_pauses()[1] == pytest.approx(seconds)


def test_requests_are_counted_by_client_when_they_are_taken_in() -> None:
    core, _ = make_core(overlap=False)
    for number, client in enumerate((1, 2, 2)):
        core.submit(request(f"r{number}"), client)
    assert core.num_taken_by_client() == {}
    core.step()
    assert core.num_taken_by_client() == {1: 1, 2: 2}
    core.ask(lambda: core.count_taken(1))
    core.step()
    assert core.num_taken_by_client() == {1: 2, 2: 2}
    assert core.num_taken_from_all == 4


def test_with_overlap_a_step_is_started_before_the_one_before_it_is_over() -> None:
    core, executor = make_core(overlap=True)
    core.submit(request("a"))
    num_started: list[int] = []
    executor.while_it_runs = lambda: num_started.append(len(executor.started))
    run(core)
    assert num_started[:2] == [2, 3]


def test_without_overlap_it_is_not() -> None:
    core, executor = make_core(overlap=False)
    core.submit(request("a"))
    num_started: list[int] = []
    executor.while_it_runs = lambda: num_started.append(len(executor.started))
    run(core)
    assert num_started[:2] == [1, 2]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_is_aborted_while_its_step_runs_gets_none_of_its_tokens(overlap: bool) -> None:
    core, executor = make_core(overlap=overlap)
    core.submit(request("a"))
    executor.while_it_runs = lambda: core.abort("a")
    assert run(core) == []
    assert not core.scheduler.has_requests()


@pytest.mark.parametrize("overlap", [False, True])
def test_an_id_that_is_in_use_is_refused_by_an_output_and_its_owner_goes_on(overlap: bool) -> None:
    core, _ = make_core(overlap=overlap)
    core.submit(request("a"), client_index=1)
    core.step()
    core.submit(request("a"), client_index=2)
    refusals = []
    for _ in range(20):
        result = core.step()
        refusals += result.outputs[2].outputs if 2 in result.outputs else []
        if result.is_idle:
            break
    assert [refusal.error for refusal in refusals] == ["request a is still in this engine"]


def test_an_abort_of_another_client_or_attempt_is_ignored() -> None:
    core, _ = make_core(overlap=False)
    core.submit(request("a"), client_index=1)
    core.abort("a", client_index=2)
    core.abort("a", client_index=1, attempt=7)
    assert len(run(core)) == 3


def test_who_asked_and_has_left_ends_nothing() -> None:
    core, _ = make_core(overlap=False)
    asked: list[str] = []
    core.ask(lambda: asked.append("left")).cancel()
    answer = core.ask(lambda: asked.append("waits"))
    core.step()
    assert answer.result(0) is None
    assert asked == ["waits"]


class BlockingWorker:
    """A worker whose step lasts until the test lets it go."""

    kv_transport = ""
    pairing = pooling = prompt_embeds_size = None
    generates = True

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.runner = self
        self.max_model_len, self.vocab_size, self.eos_token_ids, self.layout = 8, 8, (0,), None
        self.images = None
        self.attention_backend, self.attention_reason = "torch", ""
        self.linear_layers = self.cuda_graphs = self.threads = self.left_out_inputs = ""
        self.dtype = "float32"

    def launch(self, scheduler_output: SchedulerOutput) -> WorkerStep:
        assert self.may_go.wait(60)
        return WorkerStep(KnownStep(ModelRunnerOutput(scheduler_output.batch.req_ids, [[1]])), None, None)

    def shutdown(self) -> None:
        self.may_go.set()


def test_the_in_process_executor_gives_the_worker_a_thread_of_its_own_if_steps_overlap() -> None:
    scheduler = make_scheduler(overlap=True)
    core_worker = BlockingWorker()
    worker: Worker = core_worker  # type: ignore[assignment]  # it has all that the executor asks for
    executor = InProcessExecutor(worker, overlap=True)
    step = executor.start(scheduler.schedule())
    core_worker.may_go.set()
    assert step.result().req_ids == []
    executor.shutdown()
