"""A prefill and a decode engine with tiny pools, joined by simulated links: blocks are safe, nothing waits for ever.

The argument is in docs/states.md; this tries to break it. Connectors and transfer tables are the real ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.config import EngineRoleName
from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import FinishReason, Request
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.reports import LoadOutcome, ReceivedKV
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from kv_transfer.prefix.prefix_sources import PrefixSources
from kv_transfer.sides.scheduler_side import SchedulerSide
from tests.actors.core.admission_order import check_admission_order
from tests.actors.core.arrivals import CHUNK_BOUNDS
from tests.actors.core.builders import BLOCK_SIZE, Clock, make_request, make_scheduler
from tests.actors.core.chunk_bounds import ROLES, ChunkBound
from tests.actors.core.fakes import reference_tokens
from tests.actors.core.known_speed import KnownSpeed
from tests.actors.core.simulated_engine import SimulatedEngine
from tests.actors.core.simulated_link import (
    DEAD,
    DECODE,
    PREFILL,
    Network,
    SimulatedLink,
    block_ids_of,
    layout_with_states,
)
from tests.kv_transfer.reported import Reported

MAX_MODEL_LEN = 40
READY_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Setup:
    num_blocks: int
    max_num_seqs: int
    budget: int
    chunked: bool
    policy: Any
    caching: bool
    watermark: float
    overlap: bool
    failure: Any
    bound: ChunkBound
    token_s: float | None


SETUPS = st.builds(
    Setup,
    num_blocks=st.integers(5, 14),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(4, 24),
    chunked=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
    watermark=st.sampled_from([0.0, 0.1]),
    overlap=st.booleans(),
    failure=st.sampled_from(["recompute", "fail"]),
    bound=CHUNK_BOUNDS,
    token_s=st.sampled_from([None, 1.0, 1.0]),
)


@dataclass(frozen=True)
class Arrival:
    """kind: a handoff whose ends arrive together or one after the other, one end of it alone, or no handoff."""

    num_shared: int
    num_own: int
    max_tokens: int
    priority: int
    num_resumed: int
    kind: str


ARRIVALS = st.builds(
    Arrival,
    num_shared=st.sampled_from([0, 4, 7, 8, 12]),
    num_own=st.integers(0, 10),
    max_tokens=st.integers(1, 16),
    priority=st.integers(0, 2),
    num_resumed=st.sampled_from([0, 0, 2]),
    kind=st.sampled_from(
        [
            *["handoff"] * 6,
            "producer first",
            "consumer first",
            *["local at prefill"] * 2,
            *["local at decode"] * 2,
            "producer is dead",
            "producer has nothing",
            "consumer is dead",
        ]
    ),
)
ENGINES = st.sampled_from(["prefill", "decode"])


class PrefillDecodeMachine(RuleBasedStateMachine):
    """All that engines and links may do, in any order; then faults stop, and everything has to end."""

    @initialize(
        prefill=SETUPS,
        decode=SETUPS,
        max_reserved=st.integers(1, 4),
        max_chunk_bytes=st.sampled_from([1, 8 << 20]),
        num_state_blocks=st.sampled_from([0, 0, 1, 2]),
    )
    def start(
        self, prefill: Setup, decode: Setup, max_reserved: int, max_chunk_bytes: int, num_state_blocks: int
    ) -> None:
        self.clock = Clock()
        config = KVTransferConfig(
            ready_timeout_s=READY_TIMEOUT_S,
            chunk_timeout_s=3.0,
            max_reserved_requests=max_reserved,
            max_chunk_bytes=max_chunk_bytes,
        )
        self.num_state_blocks = num_state_blocks
        self.network = Network(config, self.clock, layout=layout_with_states(num_state_blocks))
        self.prefill = self.make_engine(prefill, config, is_producer=True)
        self.decode = self.make_engine(decode, config, is_producer=False)
        self.engines = {"prefill": self.prefill, "decode": self.decode}
        self.late_ends: list[tuple[SimulatedEngine, Request]] = []
        self.num_requests = 0
        self.has_faults = False

    def make_engine(self, setup: Setup, config: KVTransferConfig, *, is_producer: bool) -> SimulatedEngine:
        scheduler = make_scheduler(
            num_blocks=setup.num_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=max(setup.budget, setup.max_num_seqs),
            enable_chunked_prefill=setup.chunked,
            policy=setup.policy,
            watermark=setup.watermark,
            enable_prefix_caching=setup.caching,
            overlap=setup.overlap,
            connector=SchedulerSide(config, BLOCK_SIZE),
            prefix_sources=self.make_sources(is_producer=is_producer) or KnownSpeed(setup.token_s),
            load_failure_policy=setup.failure,
            handoff_timeout_s=10.0,
            num_state_blocks=self.num_state_blocks,
            clock=self.clock,
        )
        setup.bound.apply(scheduler)
        end = self.network.add(PREFILL if is_producer else DECODE)
        engine = SimulatedEngine(scheduler, end.table, self.clock, max_in_flight=2 if setup.overlap else 1)
        end.read, end.write = engine.read_block, engine.write_block
        return engine

    def make_sources(self, *, is_producer: bool) -> PrefixSources | None:
        """The places outside the engine where prefixes may be: none, in this machine, which None stands for."""
        return None

    # -- requests ------------------------------------------------------------------------------------------------

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=5))
    def arrive(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            self.submit(arrival)

    def submit(self, arrival: Arrival) -> None:
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        producer, consumer = self.make_ends(request_id, arrival)
        match arrival.kind:
            case "local at prefill":
                self.prefill.submit(self.make_end(request_id, arrival))
            case "local at decode":
                self.decode.submit(self.make_end(request_id, arrival))
            case "producer first":
                self.prefill.submit(producer)
                self.late_ends.append((self.decode, consumer))
            case "consumer first":
                self.decode.submit(consumer)
                self.late_ends.append((self.prefill, producer))
            case "handoff":
                self.decode.submit(consumer)
                self.prefill.submit(producer)
            case "consumer is dead":
                self.prefill.submit(producer)
            case _:
                self.decode.submit(consumer)
        if arrival.kind.endswith(("dead", "nothing")):
            self.has_faults = True

    @rule(data=st.data(), num_samples=st.integers(1, 3), max_tokens=st.integers(1, 16))
    def sample(self, data: st.DataObject, num_samples: int, max_tokens: int) -> None:
        """Further samples of a prompt that the decode engine has, or will have."""
        scheduler = self.decode.scheduler
        leaders = sorted(scheduler.running.by_id or scheduler.requests)
        if not leaders:
            return
        prompt = scheduler.requests[data.draw(st.sampled_from(leaders))].prompt_token_ids
        for _ in range(num_samples):
            self.num_requests += 1
            now_s = self.clock.now_s
            self.decode.submit(
                make_request(f"r{self.num_requests}", prompt, max_tokens=max_tokens, arrival_time_s=now_s)
            )

    def make_ends(self, request_id: str, arrival: Arrival) -> tuple[Request, Request]:
        peer = DEAD if arrival.kind == "producer is dead" else PREFILL
        producer = self.make_end(request_id, arrival, (TransferRole.PRODUCER, DECODE))
        return producer, self.make_end(request_id, arrival, (TransferRole.CONSUMER, peer))

    def make_end(
        self, request_id: str, arrival: Arrival, end: tuple[TransferRole, EngineAddress] | None = None
    ) -> Request:
        own_first = 100 if arrival.num_own % 2 else 1000 * self.num_requests
        prompt = [*range(1, arrival.num_shared + 1), *range(own_first, own_first + arrival.num_own)] or [1]
        request = make_request(
            request_id,
            prompt,
            max_tokens=arrival.max_tokens,
            priority=arrival.priority,
            arrival_time_s=self.clock.now_s,
            output_token_ids=reference_tokens(prompt, min(arrival.num_resumed, arrival.max_tokens)),
        )
        if end is not None:
            request.transfer_role = end[0]
            request.kv_transfer_params = KVTransferParams(request_id, 0, end[0], end[1])
        return request

    @precondition(lambda self: self.late_ends)
    @rule()
    def late_end_arrives(self) -> None:
        engine, request = self.late_ends.pop(0)
        engine.submit(request)

    @rule(name=ENGINES, role=st.sampled_from(ROLES))
    def role_is_switched(self, name: str, role: EngineRoleName) -> None:
        """The engine mixes prompts and decodes in other parts from the next step on; transfers under way go on."""
        self.engines[name].scheduler.chunk_budget.set_role(role)

    @rule(data=st.data(), name=ENGINES, at_both=st.booleans())
    def abort(self, data: st.DataObject, name: str, at_both: bool) -> None:
        unfinished = sorted(self.engines[name].scheduler.requests)
        if not unfinished:
            return
        self.has_faults = True
        request_id = data.draw(st.sampled_from(unfinished))
        for engine in self.engines.values() if at_both else [self.engines[name]]:
            engine.abort(request_id)

    @rule(by_s=st.sampled_from([0.5, 4.0, 11.0]))
    def time_passes(self, by_s: float) -> None:
        self.has_faults = True
        self.clock.now_s += by_s
        self.network.look_at_the_clock()

    # -- steps ---------------------------------------------------------------------------------------------------

    @rule(name=ENGINES)
    def schedule(self, name: str) -> None:
        if self.engines[name].may_schedule():
            self.engines[name].schedule()

    @rule(name=ENGINES)
    def execute(self, name: str) -> None:
        if self.engines[name].planned:
            self.engines[name].execute()

    @rule(name=ENGINES)
    def update(self, name: str) -> None:
        if self.engines[name].executed:
            self.engines[name].update()

    @rule(name=ENGINES)
    def agent_works(self, name: str) -> None:
        self.engines[name].agent_works()

    @rule(names=st.lists(st.sampled_from(["prefill", "decode", "links"]), min_size=1, max_size=12))
    def run(self, names: list[str]) -> None:
        for name in names:
            if name == "links":
                self.network.settle()
            else:
                self.engines[name].step()
            self.check()

    # -- links ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.network.links)
    @rule(data=st.data(), num_events=st.integers(1, 6))
    def links_work(self, data: st.DataObject, num_events: int) -> None:
        for _ in range(num_events):
            possible = [
                (number, event)
                for number, link in enumerate(self.network.links)
                for event in range(len(self.network.events()))
                if self.is_possible(link, event)
            ]
            if not possible:
                return
            number, event = data.draw(st.sampled_from(possible))
            self.network.events()[event](self.network.links[number])
            self.check()

    def is_possible(self, link: SimulatedLink, event: int) -> bool:
        return bool(
            [
                link.upward,
                link.downward,
                link.leaving,
                link.flying and link.receives,
                link.is_cut and not link.is_known_to_producer,
                link.is_cut and not link.is_known_to_consumer,
            ][event]
        )

    @rule()
    def links_settle(self) -> None:
        self.network.settle()

    @precondition(lambda self: any(not link.is_cut for link in self.network.links))
    @rule(number=st.integers(0, 2))
    def lose_link(self, number: int) -> None:
        links = [link for link in self.network.links if not link.is_cut]
        self.has_faults = True
        links[number % len(links)].cut()

    @rule(data=st.data(), name=ENGINES)
    def late_completion(self, data: st.DataObject, name: str) -> None:
        """A report that nothing waits for: the second of its kind, or of a request that nobody knows."""
        engine = self.engines[name]
        sent = data.draw(st.sampled_from(["nobody", *sorted(engine.reported.finished_sending, key=str)]))
        received = data.draw(st.sampled_from(["nobody", *sorted(engine.reported.finished_recving, key=str)]))
        late = Reported(
            ready_to_prefill={"nobody", *engine.reported.ready_to_prefill},
            failed_sending={sent: "late"},
            finished_sending={sent},
            finished_recving={received: ReceivedKV(LoadOutcome.CANCELLED)},
        )
        engine.table.output.merge(late.output())

    # -- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        for engine in self.engines.values():
            engine.scheduler.check_integrity()
            engine.check_promised()
            check_admission_order(engine.scheduler.config, engine.submitted.values())
        for link in self.network.links:
            for job in link.jobs_leaving:
                self.check_leaving(str(job.transfer_id), block_ids_of(job))

    def check_leaving(self, transfer_id: str, block_ids: list[int]) -> None:
        self.prefill.check_leaving(transfer_id, block_ids)

    # -- the end -------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "prefill"):
            return
        while self.late_ends:
            self.late_end_arrives()
        self.run_until_quiet()
        self.assert_that_only_the_dead_are_waited_for()
        for _ in range(12 * (self.num_requests + 1)):
            if not any(engine.scheduler.has_requests() for engine in self.engines.values()):
                break
            self.clock.now_s += 4.0
            self.network.look_at_the_clock()
            self.run_until_quiet()
        for engine in self.engines.values():
            assert not engine.scheduler.has_requests(), f"stuck: {engine.scheduler.requests}"
            pool = engine.scheduler.kv_cache_manager.block_pool
            assert pool.num_free_blocks == pool.num_blocks
            assert not engine.promised
            for request_id in engine.submitted:
                self.check_tokens(engine, request_id)

    def run_until_quiet(self) -> None:
        """Step and deliver, while no time passes, until nothing happens any more. That has to come soon."""
        num_quiet_rounds = 0
        for _ in range(80 * (self.num_requests + 1)):
            happened = [engine.step() for engine in self.engines.values()]
            self.check()
            happened.append(self.network.settle())
            self.check()
            num_quiet_rounds = 0 if any(happened) else num_quiet_rounds + 1
            if num_quiet_rounds > 3:
                return
        raise AssertionError("the engines are busy, and get nowhere")

    def assert_that_only_the_dead_are_waited_for(self) -> None:
        """No time has passed: what is left waits for a peer that does not exist any more, or behind one that does."""
        unready = self.prefill.scheduler.remote.blocked_producers.keys()
        assert self.prefill.scheduler.requests.keys() == unready
        assert not self.prefill.scheduler.remote.held
        remote = self.decode.scheduler.remote
        loads = {*remote.loading, *remote.held}
        assert not loads & unready, "a load and its producer wait for each other"
        if not loads:
            assert not self.decode.scheduler.requests

    def check_tokens(self, engine: SimulatedEngine, request_id: str) -> None:
        """Check that a client saw a gapless part of the only right answer, up to its end if the request ended well."""
        request = engine.submitted[request_id]
        prompt = request.prompt_token_ids
        right = reference_tokens(prompt, min(request.max_tokens, MAX_MODEL_LEN - len(prompt)))
        first, seen = engine.tokens_of(request_id)
        assert seen == right[first : first + len(seen)]
        ends = engine.ends_of(request_id)
        if not ends:
            assert request_id in engine.aborted or self.has_ended_at_its_producer(request_id)
            return
        [end] = ends
        if end.end_cause is EndCause.HANDED_OVER:
            assert len(seen) == 1
        elif end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert request.output_token_ids == right
        elif not self.has_faults:
            assert end.error is not None
            assert self.is_refused(request_id), f"{request_id} failed without a fault: {end.error}"

    def has_ended_at_its_producer(self, request_id: str) -> bool:
        ends = self.prefill.ends_of(request_id)
        return bool(ends) and ends[0].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

    def is_refused(self, request_id: str) -> bool:
        """One of the ends can not take it, or it came complete: then its peer waits in vain."""
        return any(
            request_id in engine.submitted and engine.submitted[request_id].scheduled_at_s is None
            for engine in self.engines.values()
        )


_SETTINGS = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))

TestPrefillDecode = PrefillDecodeMachine.TestCase
TestPrefillDecode.settings = settings(_SETTINGS, max_examples=50)


class PrefillDecodeMachineInTestMore(PrefillDecodeMachine):
    """The same, with more examples."""


TestPrefillDecodeInTestMore = pytest.mark.timeout(600)(pytest.mark.more(PrefillDecodeMachineInTestMore.TestCase))
TestPrefillDecodeInTestMore.settings = settings(_SETTINGS, max_examples=150)


class PrefillDecodeMachineAtLength(PrefillDecodeMachine):
    """The same, for long."""


TestPrefillDecodeAtLength = pytest.mark.timeout(7200)(pytest.mark.long(PrefillDecodeMachineAtLength.TestCase))
TestPrefillDecodeAtLength.settings = settings(_SETTINGS, max_examples=15_000)
