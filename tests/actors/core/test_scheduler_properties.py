"""The invariants hold after every rule, and everything ends, whatever comes in whatever order.

Tests of actors/core/integrity.py.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.outputs.model_runner_output import DraftTokenIds
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.request import FinishReason, Request, RequestStatus
from actors.core.requests.sampling_params import PoolingParams, StructuredOutputParams
from actors.core.requests.structured_output import GrammarFailure
from actors.core.vllm_view import finished_sending
from kv_transfer.connector.reports import LoadOutcome, ReceivedKV
from kv_transfer.connector.steps import Reservation
from kv_transfer.connector.store_steps import BlockLoad, LoadedBlocks, StoreMetadata
from kv_transfer.params import TransferRole
from kv_transfer.prefix.prefix_sources import PrefixSources
from kv_transfer.stores.host_blocks import HostMemoryScheduler
from kv_transfer.stores.store_set import KVStoreScheduler, StoreSet
from tests.actors.core.admission_order import check_admission_order
from tests.actors.core.arrivals import ARRIVALS, SETUPS, Arrival, Setup, place_items, share_slots, show_images
from tests.actors.core.builders import BLOCK_SIZE, EOS, Clock, make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector, FakeGrammars, describe, next_token, reference_tokens
from tests.kv_transfer.reported import Reported
from tests.kv_transfer.stores.memory_store import EverythingStore

GARBAGE = -99
ANY_JSON = StructuredOutputParams("json_object")


class SchedulerMachine(RuleBasedStateMachine):
    """One engine that is producer and consumer at once, with peers that do anything that the protocol allows."""

    @initialize(setup=SETUPS)
    def start(self, setup: Setup) -> None:
        self.set_up(setup)

    def set_up(self, setup: Setup) -> None:
        self.setup = setup
        self.clock = Clock()
        self.grammars = FakeGrammars()
        self.connector = FakeConnector(max_reserved_requests=setup.max_reserved)
        tiers: list[KVStoreScheduler] = [HostMemoryScheduler(setup.num_host_blocks)] if setup.num_host_blocks else []
        tiers += [EverythingStore()] if setup.stores_all else []
        self.stores = StoreSet(tiers) if tiers else None
        self.stored: dict[tuple[int, bytes], list[int]] = {}
        self.store_loads: dict[str, BlockLoad] = {}
        self.max_model_len = setup.num_slots
        self.scheduler = make_scheduler(
            num_blocks=setup.num_blocks,
            max_model_len=self.max_model_len,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=max(setup.budget, setup.max_num_seqs),
            enable_chunked_prefill=setup.chunked,
            long_prefill_token_threshold=setup.threshold,
            policy=setup.policy,
            watermark=setup.watermark,
            enable_prefix_caching=setup.caching,
            overlap=setup.overlap,
            num_speculative_tokens=0 if setup.num_state_blocks else setup.num_drafts,
            num_lookahead_tokens=setup.num_lookahead,
            max_loras=setup.max_loras,
            encoder_budget=setup.encoder_size,
            encoder_cache_size=setup.encoder_size,
            priority_ageing_s=setup.ageing_s,
            fairness=setup.fairness,
            structured_output=self.grammars,
            connector=self.connector,
            prefix_sources=PrefixSources(self.stores, None),
            load_failure_policy=setup.failure,
            num_state_blocks=setup.num_state_blocks,
            clock=self.clock,
        )
        setup.bound.apply(self.scheduler)
        self.driver = Driver(self.scheduler)
        self.submitted: dict[str, Request] = {}
        self.unanswered: set[str] = set()
        # A step is executed as late as can be, just before it is taken in.
        self.in_flight: deque[SchedulerOutput] = deque()
        self.transfers = Reported()
        self.num_requests = 0
        # What a peer's link may still touch: reservations until their report, announced blocks until finished_sending.
        self.links: dict[str, Reservation] = {}
        self.sent: set[str] = set()
        self.announced: dict[str, tuple[tuple[int, ...], list[int], int]] = {}

    # -- requests ------------------------------------------------------------------------------------------------

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=5))
    def arrive(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            self.submit(arrival)

    def submit(self, arrival: Arrival) -> None:
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        kinds = self.setup.kinds
        prompt = arrival.prompt(self.num_requests, self.setup)
        is_pooling = "pooling" in kinds and arrival.is_pooling
        num_resumed = min(arrival.num_resumed, arrival.max_tokens, max(0, self.max_model_len - len(prompt)))
        num_resumed = num_resumed if "resumed" in kinds and not is_pooling else 0
        has_deadline = "deadline" in kinds and arrival.deadline_in_s is not None
        request = make_request(
            request_id,
            prompt,
            max_tokens=arrival.max_tokens,
            priority=arrival.priority,
            arrival_time_s=self.clock.now_s,
            deadline_s=self.clock.now_s + (arrival.deadline_in_s or 0) if has_deadline else None,
            output_token_ids=reference_tokens(prompt, num_resumed),
            role=arrival.role if "handoff" in kinds and not is_pooling else None,
            tenant=arrival.tenant,
            lora_name=arrival.lora_name if "lora" in kinds else None,
            structured_output=ANY_JSON if "grammar" in kinds and arrival.has_grammar else None,
            pooling_params=PoolingParams(pooling="mean") if is_pooling else None,
            mm_features=place_items(arrival.items, len(prompt)) if "image" in kinds else (),
        )
        self.submitted[request_id] = request
        if arrival.is_ready:
            self.transfers.ready_to_prefill.add(request_id)
        self.scheduler.add_request(request)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), role=st.sampled_from([None, None, TransferRole.PRODUCER]))
    def next_turn(self, data: st.DataObject, role: TransferRole | None) -> None:
        """The prompt of an earlier request and more of what follows it, as a chat goes on."""
        earlier = self.submitted[data.draw(st.sampled_from(sorted(self.submitted)))]
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        prompt = [*earlier.prompt_token_ids, *reference_tokens(earlier.prompt_token_ids, 3, eos=-1)][
            : self.max_model_len
        ]
        request = make_request(request_id, prompt, max_tokens=3, arrival_time_s=self.clock.now_s, role=role)
        self.submitted[request_id] = request
        self.transfers.ready_to_prefill.add(request_id)
        self.scheduler.add_request(request)

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data(), num_samples=st.integers(1, 3), max_tokens=st.integers(1, 9), num_resumed=st.integers(0, 3))
    def sample(self, data: st.DataObject, num_samples: int, max_tokens: int, num_resumed: int) -> None:
        """Further samples of the prompt of a request that runs: they copy the end of it, if it is computed."""
        leader = self.scheduler.requests[data.draw(st.sampled_from(sorted(self.scheduler.running.by_id)))]
        for _ in range(num_samples):
            self.num_requests += 1
            request = make_request(
                f"r{self.num_requests}",
                leader.prompt_token_ids,
                max_tokens=max_tokens,
                output_token_ids=reference_tokens(
                    leader.prompt_token_ids,
                    max(0, min(num_resumed, max_tokens, self.max_model_len - leader.num_prompt_tokens)),
                ),
                arrival_time_s=self.clock.now_s,
                tenant=leader.tenant,
                lora_name=None if leader.lora is None else leader.lora.name,
                mm_features=leader.mm_features,
            )
            self.submitted[request.request_id] = request
            self.scheduler.add_request(request)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        self.unanswered.add(request_id)
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @rule(by_s=st.sampled_from([0.5, 4.0, 11.0]))
    def time_passes(self, by_s: float) -> None:
        self.clock.now_s += by_s

    @precondition(lambda self: self.grammars.compiling)
    @rule(failure=st.sampled_from([None, None, None, GrammarFailure("bad grammar")]))
    def grammars_are_compiled(self, failure: GrammarFailure | None) -> None:
        self.grammars.compiled |= dict.fromkeys(self.grammars.compiling, failure)
        self.grammars.compiling.clear()

    # -- steps ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.in_flight) < self.setup.depth)
    @rule()
    def schedule(self) -> None:
        output = self.scheduler.schedule()
        assert output.total_num_scheduled_tokens <= self.scheduler.config.max_num_batched_tokens
        assert len(output.num_scheduled_tokens) <= self.scheduler.config.max_num_seqs
        assert all(num_tokens > 0 for num_tokens in output.num_scheduled_tokens.values())
        assert output.kv_connector_metadata is not None
        if output.kv_connector_metadata.stores is not None:
            self._save(output.kv_connector_metadata.stores)
        for reservation in output.kv_connector_metadata.reservations:
            self.links[reservation.key.name] = reservation
        for reservation in self.links.values():
            # A load in transfer may write anything into the blocks that were promised to it.
            self._scribble(reservation, 0)
        self.in_flight.append(output)

    @precondition(lambda self: self.in_flight)
    @rule()
    def update(self) -> None:
        output = self.in_flight.popleft()
        assert output.kv_connector_metadata is not None
        if output.kv_connector_metadata.stores is not None:
            self._load(output.kv_connector_metadata.stores)
        model_output = self.driver.worker.execute(output)
        for progress in output.kv_connector_metadata.progress:
            if progress.key.name in self.sent:
                continue  # It ended while this step was under way, and nothing of it was wanted any more.
            tokens = list(self.submitted[progress.key.name].all_token_ids)
            self.announced[progress.key.name] = (progress.block_ids, tokens, progress.num_computed_tokens_after)
        model_output.kv_connector_output, self.transfers = self.transfers.output(), Reported()
        outputs = self.scheduler.update_from_output(output, model_output)
        for client in outputs.values():
            self.driver.outputs += client.outputs
        self._draft()
        self.sent |= finished_sending(model_output)
        for request_id in finished_sending(model_output):
            self.announced.pop(request_id, None)

    def _draft(self) -> None:
        """Propose tokens for everything that runs, the right ones for every other request."""
        if not self.scheduler.config.speculative:
            return
        running = list(self.scheduler.running)
        drafts = [
            reference_tokens(request.all_token_ids, self.setup.num_drafts, eos=-1)
            if number % 2
            else [5] * self.setup.num_drafts
            for number, request in enumerate(running)
        ]
        self.scheduler.update_draft_token_ids(DraftTokenIds([request.request_id for request in running], drafts))

    @rule(num_steps=st.integers(1, 8))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def step(self) -> bool:
        """Schedule as far ahead as the engine goes, then take one step in; returns whether anything happened."""
        while len(self.in_flight) < self.setup.depth:
            self.schedule()
        num_outputs, is_empty = len(self.driver.outputs), self.in_flight[0].is_empty()
        self.update()
        self.blocks_and_queues_agree()
        self.announced_blocks_keep_their_kv()
        return not is_empty or len(self.driver.outputs) > num_outputs

    def num_steps_for_progress(self) -> int:
        return 20 * (len(self.submitted) + 1) + 4 * self.setup.num_slots

    @precondition(lambda self: self.scheduler.requests)
    @rule()
    def nothing_comes_from_outside(self) -> None:
        """Within a bounded number of steps a request advances for good, until all that is left waits for others."""
        num_quiet_steps = num_steps = num_advances = 0
        while num_quiet_steps <= self.setup.depth:
            num_quiet_steps = 0 if self.step() else num_quiet_steps + 1
            num_steps = num_steps + 1 if num_advances == (num_advances := self.num_advances()) else 0
            assert num_steps < self.num_steps_for_progress(), f"busy, and gets nowhere: {describe(self.scheduler)}"
        remote = self.scheduler.remote
        waits_for_outside = remote.blocked_producers or self.links or remote.has_transfers or self.grammars.compiling
        if self.scheduler.next_deadline() is None and not waits_for_outside:
            assert not self.scheduler.requests, f"nothing happens any more: {describe(self.scheduler)}"

    @precondition(lambda self: "lora" in self.setup.kinds)
    @rule(adapter=st.sampled_from(["x", "y", "z"]), num_own=st.integers(1, 9))
    def busy_adapters_stay_busy(self, adapter: str, num_own: int) -> None:
        """Check that a wait for an adapter's slot is bounded, although requests for others never stop."""
        others = sorted({"x", "y", "z"} - {adapter})
        for number in range(4):
            for other in others:
                self._add_to_stream(other, 1, 3 + number)
        self.step()
        waiting = self._add_to_stream(adapter, num_own, 3)
        for _ in range(100 + 20 * len(self.scheduler.requests)):
            self.step()
            if waiting.is_finished() or waiting.request_id in self.scheduler.running:
                return
            unfinished = Counter(request.lora.name for request in self.scheduler.requests.values() if request.lora)
            for other in others:
                if unfinished[other] < 4:
                    self._add_to_stream(other, 1, 3 + self.num_requests % 5)
            self.clock.now_s += 0.25
        # Whatever else it waits for is for other rules to judge.
        assert waiting not in self.set_aside(), f"{waiting.request_id} gets no slot: {describe(self.scheduler)}"

    def set_aside(self) -> list[Request]:
        queues = self.scheduler._queues
        return [*queues.loaded_for_lora, *queues.waiting_for_lora]

    def _add_to_stream(self, adapter: str, num_own: int, max_tokens: int) -> Request:
        """Add a request that comes after all others by any policy, and does not end before it has all its tokens."""
        self.num_requests += 1
        prompts = ([*range(first, first + num_own)] for first in count(1000 * self.num_requests))
        request = make_request(
            f"r{self.num_requests}",
            next(prompt for prompt in prompts if EOS not in reference_tokens(prompt, max_tokens)),
            max_tokens=max_tokens,
            priority=2,
            arrival_time_s=self.clock.now_s,
            lora_name=adapter,
        )
        self.submitted[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def num_advances(self) -> int:
        """The number of events that are never taken back: tokens that clients have, ends; not preemptions."""
        return sum(output.preemption is None for output in self.driver.outputs)

    # -- peers ---------------------------------------------------------------------------------------------------

    @rule()
    def peers_are_ready(self) -> None:
        self.transfers.ready_to_prefill.update(self.submitted)

    @precondition(lambda self: self.links)
    @rule(data=st.data(), outcome=st.sampled_from([*LoadOutcome, LoadOutcome.FAILED]), part=st.integers(0, 3))
    def load_ends(self, data: st.DataObject, outcome: LoadOutcome, part: int) -> None:
        self._end_load(data.draw(st.sampled_from(sorted(self.links))), outcome, part)

    @precondition(lambda self: self.scheduler.remote.held)
    @rule(data=st.data())
    def send_ends(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.remote.held)))
        if self.connector.roles.get(request_id) is TransferRole.PRODUCER:
            self.transfers.finished_sending.add(request_id)

    @precondition(lambda self: any(r is TransferRole.PRODUCER for r in self.connector.roles.values()))
    @rule(data=st.data())
    def consumer_is_lost(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.connector.roles)))
        if self.connector.roles[request_id] is TransferRole.PRODUCER:
            self.transfers.failed_sending[request_id] = "the consumer is gone"

    @rule(data=st.data())
    def late_completion(self, data: st.DataObject) -> None:
        """A completion that nothing waits for."""
        known = {*self.scheduler.requests, *self.scheduler.remote.held, *self.links}
        request_id = data.draw(st.sampled_from(["nobody", *sorted(set(self.submitted) - known)]))
        self.transfers.finished_sending.add(request_id)
        self.transfers.finished_recving[request_id] = ReceivedKV(LoadOutcome.CANCELLED)

    def _scribble(self, reservation: Reservation, num_valid_tokens: int) -> None:
        first = max(num_valid_tokens, reservation.num_local_blocks * BLOCK_SIZE)
        for position in range(first, reservation.num_prompt_tokens):
            block_id = reservation.block_ids[position // BLOCK_SIZE]
            self.driver.worker.slots[block_id * BLOCK_SIZE + position % BLOCK_SIZE] = GARBAGE
        for block_id in self._state_of(reservation):
            self.driver.worker.fill(block_id, GARBAGE)

    def _state_of(self, reservation: Reservation) -> tuple[int, ...]:
        return reservation.block_ids[-(-reservation.num_prompt_tokens // BLOCK_SIZE) :]

    def _end_load(self, request_id: str, outcome: LoadOutcome, part: int) -> None:
        reservation = self.links.pop(request_id)
        tokens = self.submitted[request_id].all_token_ids[: reservation.num_prompt_tokens]
        first_token_id = next_token(tokens) if outcome is LoadOutcome.LOADED else None
        if first_token_id == EOS:
            # A producer would have ended the request itself.
            outcome, first_token_id = LoadOutcome.RELEASED, None
        num_local_tokens = reservation.num_local_blocks * BLOCK_SIZE
        num_valid_tokens = len(tokens) if outcome is LoadOutcome.LOADED else len(tokens) * part // 3
        num_valid_tokens = max(num_valid_tokens, num_local_tokens)
        self._scribble(reservation, num_valid_tokens)
        num_received_tokens = num_valid_tokens - num_local_tokens
        self.driver.worker.write(reservation.block_ids, tokens, num_local_tokens, num_received_tokens)
        if outcome is LoadOutcome.LOADED:
            self.driver.worker.write_state(self._state_of(reservation), tokens)
        self.transfers.finished_recving[request_id] = ReceivedKV(outcome, num_valid_tokens, first_token_id)
        if outcome is LoadOutcome.RELEASED:
            self.unanswered.add(request_id)

    # -- stores --------------------------------------------------------------------------------------------------

    def _save(self, metadata: StoreMetadata) -> None:
        """Do what the worker side does before the links hear of the step. Nothing under way writes what is saved."""
        slots = self.driver.worker.slots
        for store, block_hash in metadata.dropped:
            self.stored.pop((store, block_hash), None)
        for save in metadata.saves:
            first = save.block_id * BLOCK_SIZE
            assert (save.store, save.block_hash) not in self.stored, "saved twice"
            self.stored[save.store, save.block_hash] = slots[first : first + BLOCK_SIZE]

    def _load(self, metadata: StoreMetadata) -> None:
        self.store_loads.update((load.request_id, load) for load in metadata.loads)
        for request_id in metadata.cancelled_loads:
            if request_id in self.store_loads:
                self._end_store_load(request_id, 0)

    @precondition(lambda self: self.store_loads)
    @rule(data=st.data(), part=st.sampled_from([0, 1, 3, 3, 3]))
    def store_load_ends(self, data: st.DataObject, part: int) -> None:
        self._end_store_load(data.draw(st.sampled_from(sorted(self.store_loads))), part)

    def _end_store_load(self, request_id: str, part: int) -> None:
        """Some of the blocks come, the others get garbage: a store may break off at any byte."""
        blocks = self.store_loads.pop(request_id).blocks
        num_blocks = len(blocks) * part // 3
        for index, block in enumerate(blocks):
            first = block.block_id * BLOCK_SIZE
            kv = self.stored[block.store, block.block_hash] if index < num_blocks else [GARBAGE] * BLOCK_SIZE
            self.driver.worker.slots[first : first + BLOCK_SIZE] = kv
        self.transfers.finished_loading[request_id] = LoadedBlocks(num_blocks)

    # -- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def blocks_and_queues_agree(self) -> None:
        self.scheduler.check_integrity()
        check_admission_order(self.scheduler.config, self.submitted.values())

    @invariant()
    def announced_blocks_keep_their_kv(self) -> None:
        for block_ids, tokens, num_tokens in self.announced.values():
            self.driver.worker.check(block_ids, tokens, num_tokens)
            if num_tokens == len(tokens):
                # From here on the state leaves, and no later step may change it.
                self.driver.worker.check_state(block_ids[-(-num_tokens // BLOCK_SIZE) :], tokens)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(self.num_steps_for_progress()):
            if not self.scheduler.has_requests() and not self.links:
                break
            self.peers_do_their_part()
            for request_id in sorted(self.store_loads):
                self._end_store_load(request_id, 3)
            self.grammars_are_compiled(None)
            self.step()
        while self.in_flight:
            self.update()
        assert not self.scheduler.has_requests(), f"stuck: {describe(self.scheduler)}"
        assert not self.scheduler.encoder_cache_manager.holders()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.num_free_blocks == pool.num_blocks
        for request in self.submitted.values():
            self.check_tokens(request)

    def peers_do_their_part(self) -> None:
        for request_id in sorted(self.links):
            is_wanted = request_id in self.scheduler.requests
            self._end_load(request_id, LoadOutcome.LOADED if is_wanted else LoadOutcome.CANCELLED, 0)
        for request_id, role in self.connector.roles.items():
            if role is TransferRole.PRODUCER:
                self.transfers.ready_to_prefill.add(request_id)
                if request_id in self.scheduler.remote.held:
                    self.transfers.finished_sending.add(request_id)

    def check_tokens(self, request: Request) -> None:
        """Check that a client saw a gapless part of the only right answer, to its end if the request ended well."""
        request_id = request.request_id
        prompt = request.prompt_token_ids
        right = reference_tokens(prompt, min(request.max_tokens, max(0, self.max_model_len - len(prompt))))
        outputs = [output for output in self.driver.outputs if output.request_id == request_id]
        seen = self.driver.tokens_of(request_id)
        first = next((output.first_position for output in outputs if output.new_token_ids), 0)
        assert seen == right[first : first + len(seen)]
        position = None
        for output in outputs:
            # Who is told of a preemption has every token before it, and may go on from there elsewhere.
            assert output.preemption is None or position in (None, output.first_position)
            if output.new_token_ids:
                position = output.first_position + len(output.new_token_ids)
        ends = [output for output in outputs if output.finished]
        assert len(ends) == 1 or (not ends and request_id in self.unanswered)
        if request.pooling_params is not None:
            assert not seen
            assert not ends or ends[0].error or ends[0].pooling_output == [float(len(prompt))]
        elif ends and ends[0].finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert request.output_token_ids == right
        if ends and ends[0].end_cause is EndCause.HANDED_OVER:
            assert len(seen) == 1


class ImageMachine(SchedulerMachine):
    """Prompts that show the same few images, in small pools with steps under way: victims leave images to others."""

    @initialize(setup=SETUPS.map(show_images))
    def start(self, setup: Setup) -> None:
        self.set_up(setup)


class AdapterMachine(SchedulerMachine):
    """Fewer slots for adapters than adapters, and room for requests of several of them."""

    @initialize(setup=SETUPS.map(share_slots))
    def start(self, setup: Setup) -> None:
        self.set_up(setup)


_SETTINGS = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(_SETTINGS, max_examples=60)
TestImages = ImageMachine.TestCase
TestImages.settings = settings(_SETTINGS, max_examples=40)
TestAdapters = AdapterMachine.TestCase
TestAdapters.settings = settings(_SETTINGS, max_examples=40)


class SchedulerMachineInTestMore(SchedulerMachine):
    """The same, with more examples."""


TestSchedulerInTestMore = pytest.mark.timeout(600)(pytest.mark.more(SchedulerMachineInTestMore.TestCase))
TestSchedulerInTestMore.settings = settings(_SETTINGS, max_examples=150)


class SchedulerMachineAtLength(SchedulerMachine):
    """The same, for long."""


class ImageMachineAtLength(ImageMachine):
    """The same, for long."""


class AdapterMachineAtLength(AdapterMachine):
    """The same, for long."""


TestSchedulerAtLength = pytest.mark.timeout(7200)(pytest.mark.long(SchedulerMachineAtLength.TestCase))
TestSchedulerAtLength.settings = settings(_SETTINGS, max_examples=25_000)
TestImagesAtLength = pytest.mark.timeout(7200)(pytest.mark.long(ImageMachineAtLength.TestCase))
TestImagesAtLength.settings = settings(_SETTINGS, max_examples=20_000)
TestAdaptersAtLength = pytest.mark.timeout(7200)(pytest.mark.long(AdapterMachineAtLength.TestCase))
TestAdaptersAtLength.settings = settings(_SETTINGS, max_examples=5_000)
