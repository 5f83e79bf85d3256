"""Two to four engines that hand over to each other in every direction: nobody waits in a circle.

Connectors, transfer tables and schedulers are the real ones. The rule of progress: with no time passing, and nothing
coming from outside, engines and links do what they can within a bounded number of rounds, and then nobody is left who
waits for a peer that waits, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.core.outputs.engine_core_outputs import EndCause, EngineCoreOutput
from actors.core.requests.multimodal import MultiModalFeature
from actors.core.requests.request import FinishReason, Request
from actors.core.requests.sampling_params import PoolingParams
from kv_transfer.config import KVTransferConfig
from kv_transfer.params import EngineAddress, HandoffRanks, KVTransferParams, TransferRole
from kv_transfer.sides.scheduler_side import SchedulerSide
from tests.actors.core.arrivals import CHUNK_BOUNDS, place_items
from tests.actors.core.builders import BLOCK_SIZE, Clock, make_request, make_scheduler
from tests.actors.core.chunk_bounds import ROLES, ChunkBound
from tests.actors.core.fakes import describe, reference_tokens
from tests.actors.core.simulated_engine import SimulatedEngine
from tests.actors.core.simulated_link import Network, SimulatedLink, block_ids_of


@dataclass(frozen=True)
class Setup:
    num_blocks: int
    max_num_seqs: int
    budget: int
    threshold: int
    policy: Any
    caching: bool
    overlap: bool
    depth: int
    num_lookahead: int
    failure: Any
    bound: ChunkBound


SETUPS = st.builds(
    Setup,
    num_blocks=st.integers(4, 12),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(4, 24),
    threshold=st.sampled_from([0, 0, 3]),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.sampled_from([True, True, False]),
    overlap=st.booleans(),
    depth=st.integers(1, 4),
    num_lookahead=st.sampled_from([0, 0, 3]),
    failure=st.sampled_from(["recompute", "fail"]),
    bound=CHUNK_BOUNDS,
)


@dataclass(frozen=True)
class Arrival:
    """order: in which the ends of a handoff come, or "local". Engines are counted around the ring."""

    first: int
    distance: int
    order: str
    num_own: int
    num_left: int | None
    max_tokens: int
    priority: int
    is_pooling: bool
    items: list[tuple[int, int]]


ARRIVALS = st.builds(
    Arrival,
    first=st.integers(0, 3),
    distance=st.integers(1, 3),
    order=st.sampled_from(["both", "both", "producer first", "consumer first", "local"]),
    num_own=st.integers(1, 24),
    num_left=st.sampled_from([None, None, 0, 1, 4]),
    max_tokens=st.integers(1, 12),
    priority=st.integers(0, 2),
    is_pooling=st.sampled_from([False, False, True]),
    items=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=2),
)
NUMBERS = st.integers(0, 3)


class RingMachine(RuleBasedStateMachine):
    """All that engines and links may do, in any order; then faults stop, and everything has to end."""

    @initialize(
        setups=st.lists(SETUPS, min_size=2, max_size=4),
        max_reserved=st.integers(1, 4),
        has_images=st.sampled_from([False, False, True]),
    )
    def start(self, setups: list[Setup], max_reserved: int, has_images: bool) -> None:
        self.clock = Clock()
        self.network = Network(
            KVTransferConfig(ready_timeout_s=20.0, chunk_timeout_s=3.0, max_reserved_requests=max_reserved), self.clock
        )
        self.setups = setups
        self.has_images = has_images
        self.addresses = [EngineAddress(f"e{number}", 1, f"127.0.0.1:{number + 1}") for number in range(len(setups))]
        self.engines = [self.make_engine(setup, address) for setup, address in zip(setups, self.addresses, strict=True)]
        self.ranks = list(range(len(setups)))
        self.late_ends: list[tuple[SimulatedEngine, Request]] = []
        self.num_requests = 0
        self.has_faults = False

    def make_engine(self, setup: Setup, address: EngineAddress) -> SimulatedEngine:
        scheduler = make_scheduler(
            num_blocks=setup.num_blocks,
            max_model_len=setup.num_blocks * BLOCK_SIZE,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=max(setup.budget, setup.max_num_seqs),
            long_prefill_token_threshold=setup.threshold,
            policy=setup.policy,
            enable_prefix_caching=setup.caching,
            overlap=setup.overlap,
            num_lookahead_tokens=setup.num_lookahead,
            connector=SchedulerSide(self.network.config, BLOCK_SIZE),
            load_failure_policy=setup.failure,
            handoff_timeout_s=10.0,
            clock=self.clock,
        )
        setup.bound.apply(scheduler)
        end = self.network.add(address)
        engine = SimulatedEngine(scheduler, end.table, self.clock, max_in_flight=setup.depth)
        end.read, end.write = engine.read_block, engine.write_block
        return engine

    # -- requests ------------------------------------------------------------------------------------------------

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=6))
    def arrive(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            self.submit(arrival)

    def submit(self, arrival: Arrival) -> None:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        num_engines = len(self.engines)
        one = arrival.first % num_engines
        other = (one + 1 + (arrival.distance - 1) % (num_engines - 1)) % num_engines
        if arrival.order == "local":
            self.engines[one].submit(self.make_end(name, arrival, one))
            return
        producer, consumer = (
            (self.engines[number], self.make_end(name, arrival, one, (role, one, other)))
            for number, role in ((one, TransferRole.PRODUCER), (other, TransferRole.CONSUMER))
        )
        now = {"both": [consumer, producer], "producer first": [producer], "consumer first": [consumer]}[arrival.order]
        for engine, request in now:
            engine.submit(request)
        self.late_ends += [end for end in (producer, consumer) if end not in now]

    def make_end(
        self, name: str, arrival: Arrival, sized_for: int, end: tuple[TransferRole, int, int] | None = None
    ) -> Request:
        """sized_for: the engine whose pool the prompt fills, if any. end: its part, the producer, the consumer."""
        num_own = arrival.num_own
        if arrival.num_left is not None:
            num_own = self.setups[sized_for].num_blocks * BLOCK_SIZE - arrival.num_left
        prompt = list(range(1000 * self.num_requests, 1000 * self.num_requests + num_own))
        items: list[MultiModalFeature] = place_items(arrival.items, num_own) if self.has_images else []
        request = make_request(
            name,
            prompt,
            max_tokens=arrival.max_tokens,
            priority=arrival.priority,
            arrival_time_s=self.clock.now_s,
            pooling_params=PoolingParams(pooling="mean") if arrival.is_pooling and end is None else None,
            mm_features=items,
        )
        if end is not None:
            role, producer, consumer = end
            peer = consumer if role is TransferRole.PRODUCER else producer
            request.transfer_role = role
            ranks = HandoffRanks(self.ranks[producer], self.ranks[consumer])
            request.kv_transfer_params = KVTransferParams(name, 0, role, self.addresses[peer], ranks=ranks)
        return request

    @rule(number=NUMBERS, rank=st.integers(0, 5))
    def role_is_switched(self, number: int, rank: int) -> None:
        """The controller gives an engine another role, and so another rank, at once; tickets of the old one may still
        be on their way, and transfers under way.
        """
        self.ranks[number % len(self.ranks)] = rank
        self.engine(number).scheduler.chunk_budget.set_role(ROLES[rank % len(ROLES)])

    @precondition(lambda self: self.late_ends)
    @rule(number=st.integers(0, 9))
    def late_end_arrives(self, number: int) -> None:
        engine, request = self.late_ends.pop(number % len(self.late_ends))
        engine.submit(request)

    @rule(data=st.data(), number=NUMBERS, at_all=st.booleans())
    def abort(self, data: st.DataObject, number: int, at_all: bool) -> None:
        engine = self.engine(number)
        unfinished = sorted(engine.scheduler.requests)
        if not unfinished:
            return
        self.has_faults = True
        request_id = data.draw(st.sampled_from(unfinished))
        for one in self.engines if at_all else [engine]:
            one.abort(request_id)

    @rule(by_s=st.sampled_from([0.5, 4.0, 11.0]))
    def time_passes(self, by_s: float) -> None:
        self.has_faults = True
        self.clock.now_s += by_s
        self.network.look_at_the_clock()

    # -- steps and links -----------------------------------------------------------------------------------------

    def engine(self, number: int) -> SimulatedEngine:
        return self.engines[number % len(self.engines)]

    @rule(number=NUMBERS, stage=st.sampled_from(["schedule", "execute", "update", "agent"]))
    def part_of_a_step(self, number: int, stage: str) -> None:
        engine = self.engine(number)
        if stage == "schedule" and engine.may_schedule():
            engine.schedule()
        elif stage == "execute" and engine.planned:
            engine.execute()
        elif stage == "update" and engine.executed:
            engine.update()
        elif stage == "agent":
            engine.agent_works()

    @rule(numbers=st.lists(st.sampled_from([0, 1, 2, 3, None]), min_size=1, max_size=12))
    def run(self, numbers: list[int | None]) -> None:
        """None: the links."""
        for number in numbers:
            if number is None:
                self.network.settle()
            else:
                self.engine(number).step()
            self.check()

    @precondition(lambda self: self.network.links)
    @rule(number=st.integers(0, 11), events=st.lists(st.integers(0, 5), min_size=1, max_size=6))
    def link_works(self, number: int, events: list[int]) -> None:
        link = self.network.links[number % len(self.network.links)]
        for event in events:
            self.network.events()[event](link)
            self.check()

    @precondition(lambda self: any(not link.is_cut for link in self.network.links))
    @rule(number=st.integers(0, 11))
    def lose_link(self, number: int) -> None:
        links: list[SimulatedLink] = [link for link in self.network.links if not link.is_cut]
        self.has_faults = True
        links[number % len(links)].cut()

    # -- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        for engine in self.engines:
            engine.scheduler.check_integrity()
            engine.check_promised()
        for link in self.network.links:
            producer = self.engines[self.addresses.index(self.network.producer_of(link).address)]
            for job in link.jobs_leaving:
                producer.check_leaving(str(job.transfer_id), block_ids_of(job))

    # -- progress and the end ------------------------------------------------------------------------------------

    @precondition(lambda self: not self.late_ends)
    @rule()
    def nothing_comes_from_outside(self) -> None:
        self.run_until_quiet()
        self.assert_that_nobody_waits_in_a_circle()

    def run_until_quiet(self) -> None:
        """Step and deliver, while no time passes, until nothing happens any more; something for good has to, soon."""
        num_quiet_rounds = num_rounds = num_advances = 0
        while num_quiet_rounds <= 4:
            happened = [engine.step() for engine in self.engines]
            self.check()
            happened.append(self.network.settle())
            self.check()
            num_quiet_rounds = 0 if any(happened) else num_quiet_rounds + 1
            num_rounds = num_rounds + 1 if num_advances == (num_advances := self.num_advances()) else 0
            assert num_rounds < 20 * (self.num_requests + 1) + 200, f"busy, and get nowhere:\n{self.describe()}"

    def num_advances(self) -> int:
        """The number of events that are never taken back: tokens that clients have, ends, and loads that are over."""
        return sum(
            sum(output.preemption is None for output in engine.outputs) + len(engine.reported.finished_recving)
            for engine in self.engines
        )

    def assert_that_nobody_waits_in_a_circle(self) -> None:
        """No time has passed: what is left waits for a READY that cannot come, since its consumer is gone, or behind
        a load whose producer is."""
        producing = {
            request.request_id
            for engine in self.engines
            for request in engine.scheduler.requests.values()
            if request.transfer_role is TransferRole.PRODUCER
        }
        loads = {name for engine in self.engines for name in engine.scheduler.remote.loading}
        assert not loads & producing, f"loads and their producers wait for each other:\n{self.describe()}"
        for engine in self.engines:
            remote = engine.scheduler.remote
            if not remote.loading and not remote.held:
                left = engine.scheduler.requests.keys() - remote.blocked_producers.keys()
                assert not left, f"nothing is in their way:\n{self.describe()}"

    def describe(self) -> str:
        return "\n".join(describe(engine.scheduler) for engine in self.engines)

    def teardown(self) -> None:
        if not hasattr(self, "engines"):
            return
        while self.late_ends:
            self.late_end_arrives(0)
        self.nothing_comes_from_outside()
        for _ in range(12 * (self.num_requests + 1)):
            if not any(engine.scheduler.has_requests() for engine in self.engines):
                break
            self.clock.now_s += 4.0
            self.network.look_at_the_clock()
            self.run_until_quiet()
        for engine in self.engines:
            assert not engine.scheduler.has_requests(), f"stuck:\n{self.describe()}"
            pool = engine.scheduler.kv_cache_manager.block_pool
            assert pool.num_free_blocks == pool.num_blocks
            assert not engine.promised
            for name in engine.submitted:
                self.check_tokens(engine, name)

    def check_tokens(self, engine: SimulatedEngine, name: str) -> None:
        """Check that a client saw a gapless part of the only right answer, up to its end if the request ended well."""
        request = engine.submitted[name]
        ends = engine.ends_of(name)
        if request.pooling_params is not None:
            assert name in engine.aborted or ends[0].error or ends[0].pooling_output == [float(request.num_tokens)]
            return
        right = reference_tokens(request.prompt_token_ids, request.max_tokens)
        first, seen = engine.tokens_of(name)
        assert seen == right[first : first + len(seen)]
        if not ends:
            assert name in engine.aborted or self.has_ended_elsewhere(engine, name)
        elif ends[0].finish_reason is FinishReason.STOP:
            assert request.output_token_ids == right
        elif ends[0].finish_reason is not FinishReason.LENGTH and not (
            ends[0].end_cause is EndCause.HANDED_OVER or self.has_faults
        ):
            assert self.is_refused(name), f"{name} failed without a fault: {ends[0]}"

    def has_ended_elsewhere(self, engine: SimulatedEngine, name: str) -> bool:
        """At its producer, by its first token."""
        ends: list[EngineCoreOutput] = [
            end for other in self.engines if other is not engine for end in other.ends_of(name)
        ]
        return bool(ends) and ends[0].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

    def is_refused(self, name: str) -> bool:
        """One of the ends cannot take it: then its peer waits in vain."""
        requests = [engine.submitted[name] for engine in self.engines if name in engine.submitted]
        return any(request.scheduled_at_s is None for request in requests)


_SETTINGS = settings(stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))

TestRing = RingMachine.TestCase
TestRing.settings = settings(_SETTINGS, max_examples=30)


class RingMachineInTestMore(RingMachine):
    """The same, with more examples."""


TestRingInTestMore = pytest.mark.timeout(600)(pytest.mark.more(RingMachineInTestMore.TestCase))
TestRingInTestMore.settings = settings(_SETTINGS, max_examples=100)


class RingMachineAtLength(RingMachine):
    """The same, for long."""


TestRingAtLength = pytest.mark.timeout(7200)(pytest.mark.long(RingMachineAtLength.TestCase))
TestRingAtLength.settings = settings(_SETTINGS, max_examples=15_000)
