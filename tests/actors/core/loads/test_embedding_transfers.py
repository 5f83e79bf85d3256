"""Blocks that embeddings take while they travel: taken when there is room, back at every end, in nobody's way.

Tests of actors/core/loads/kept_embeddings.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from actors.core.loads.embedding_transfers import EmbeddingFetch, EmbeddingTransfers, Fetched, Staging
from actors.core.loads.kept_embeddings import KeptEmbeddings
from actors.core.requests.multimodal import PackedArray
from actors.core.requests.request import RequestStatus
from actors.core.scheduler import Scheduler
from kv_transfer.connector.fetches import BytesFetch, WantedFetch
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.reports import KVConnectorOutput, LoadOutcome, ReceivedKV
from kv_transfer.params import EngineAddress
from tests.actors.core.builders import BLOCK_SIZE, Clock, make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector, reference_tokens
from tests.kv_transfer.reported import Reported, output_of

SLOT_BYTES = 10
BLOCK_BYTES = SLOT_BYTES * BLOCK_SIZE
PEER = EngineAddress("encode-0", 1, "encode-0")
TIMEOUT_S = 5.0


@dataclass
class Engine:
    """A scheduler, and a worker side that moves nothing until the test says so."""

    scheduler: Scheduler
    clock: Clock
    kept_embeddings: KeptEmbeddings
    driver: Driver = field(init=False)
    told: dict[str, list[Fetched]] = field(default_factory=dict)
    loading: dict[str, TransferKey] = field(default_factory=dict)
    """The keys under which fetches load, by image."""
    cancelled: set[TransferKey] = field(default_factory=set)
    sent: dict[TransferKey, bytes] = field(default_factory=dict)
    """The bytes on their way to others, by key; b"" for nothing."""

    def __post_init__(self) -> None:
        self.driver = Driver(self.scheduler)

    @property
    def transfers(self) -> EmbeddingTransfers:
        return self.scheduler.remote.embeddings

    def fetch(self, mm_hash: str, num_bytes: int = BLOCK_BYTES) -> EmbeddingFetch:
        told = self.told.setdefault(mm_hash, [])
        fetch = EmbeddingFetch(PEER, mm_hash, num_bytes, self.clock.now_s + TIMEOUT_S, told.append)
        self.transfers.begin(fetch)
        return fetch

    def step(self, transfers: KVConnectorOutput | None = None) -> None:
        self.driver.step(transfers)
        metadata = self.driver.steps[-1].kv_connector_metadata
        assert metadata is not None
        self.cancelled |= set(metadata.consumer_cancels)
        for reservation in metadata.reservations:
            assert isinstance(reservation.fetch, BytesFetch)
            self.loading[reservation.fetch.name] = reservation.key
        staged = {entry.key: entry.data for entry in metadata.staged}
        self.sent |= {finish.key: staged.get(finish.key, b"") for finish in metadata.producer_finishes}

    def want(self, mm_hash: str) -> WantedFetch:
        fetch = BytesFetch(f"t-{mm_hash}", mm_hash)
        want = WantedFetch(0, EngineAddress("prefill-0", 1, ""), fetch)
        self.step(output_of(wants=[want]))
        self.step()
        return want

    def receive(self, mm_hash: str, data: bytes | None = None) -> None:
        """A fetch's report: the bytes, or nothing."""
        name = self.loading.pop(mm_hash)
        outcome = LoadOutcome.CANCELLED if name in self.cancelled else LoadOutcome.LOADED
        reported = Reported(finished_recving={name: ReceivedKV(outcome, reason="")})
        if data is not None:
            reported.received_bytes[name] = data
        self.step(reported.output())

    def end_sending(self, name: TransferKey) -> None:
        del self.sent[name]
        self.step(output_of(finished_sending={name}))

    @property
    def num_held_blocks(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_blocks - pool.num_free_blocks


def make_engine(**options: Any) -> Engine:
    clock, kept_embeddings = Clock(), KeptEmbeddings()
    staging = Staging("me", SLOT_BYTES, kept_embeddings)
    return Engine(
        make_scheduler(connector=FakeConnector(), staging=staging, clock=clock, **options), clock, kept_embeddings
    )


def embeddings(num_bytes: int) -> PackedArray:
    return PackedArray("uint8", (1, num_bytes), bytes(range(num_bytes)))


def test_what_comes_is_told_and_its_blocks_are_back() -> None:
    engine = make_engine()
    engine.fetch("cat", BLOCK_BYTES + 1)
    engine.step()
    assert engine.num_held_blocks == 2
    assert engine.scheduler.has_requests(), "it is waited for"
    assert not engine.scheduler.reset_prefix_cache()
    engine.receive("cat", bytes(BLOCK_BYTES + SLOT_BYTES))
    assert engine.told["cat"] == [Fetched(bytes(BLOCK_BYTES + 1))]
    assert engine.num_held_blocks == 0
    assert not engine.scheduler.has_requests()


def test_what_is_wanted_is_pinned_until_it_has_left() -> None:
    engine = make_engine()
    engine.kept_embeddings.put("cat", embeddings(BLOCK_BYTES + 1))
    want = engine.want("cat")
    assert engine.num_held_blocks == 2
    assert engine.sent == {want.answer_key: embeddings(BLOCK_BYTES + 1).data}
    engine.want("cat")
    assert engine.num_held_blocks == 2, "a peer that repeats itself"
    engine.end_sending(want.answer_key)
    assert engine.num_held_blocks == 0
    assert not engine.scheduler.has_requests()


@pytest.mark.parametrize("is_too_large", [True, False], ids=["too large", "unknown"])
def test_who_wants_what_cannot_be_had_gets_an_answer_at_once(is_too_large: bool) -> None:
    engine = make_engine(num_blocks=8)
    if is_too_large:
        engine.kept_embeddings.put("cat", embeddings(5 * BLOCK_BYTES))
    want = engine.want("cat")
    assert engine.sent == {want.answer_key: b""}
    engine.end_sending(want.answer_key)
    assert engine.transfers.stats.num_not_sent == 1
    assert not engine.scheduler.has_requests()


def test_an_image_that_can_never_have_room_is_refused_at_once() -> None:
    engine = make_engine(num_blocks=8)
    engine.fetch("cat", 4 * BLOCK_BYTES + 1)
    [fetched] = engine.told["cat"]
    assert (fetched.data, fetched.reason) == (None, "embeddings of 161 bytes do not fit into half of the KV cache")


@pytest.mark.parametrize("is_sender", [True, False], ids=["sent", "fetched"])
def test_blocks_that_requests_need_soon_are_not_taken(is_sender: bool) -> None:
    """A running request grows, and one that waits lacks room: the image waits for both, and no longer."""
    engine = make_engine(num_blocks=8, max_num_seqs=1)
    engine.kept_embeddings.put("cat", embeddings(BLOCK_BYTES))
    scheduler = engine.scheduler
    scheduler.add_request(make_request("runs", 3 * BLOCK_SIZE, max_tokens=8, ignore_eos=True))
    scheduler.add_request(make_request("waits", 4 * BLOCK_SIZE, max_tokens=1))
    engine.step()
    if is_sender:
        engine.want("cat")
    else:
        engine.fetch("cat")
        engine.step()
    while scheduler.requests:
        assert not engine.sent
        assert not engine.loading
        engine.step()
    assert scheduler.make_stats().num_preemptions == 0
    engine.step()
    assert engine.sent or engine.loading
    assert engine.num_held_blocks == 1


def test_a_fetch_without_room_ends_at_its_deadline_with_nothing_held() -> None:
    engine = make_engine(num_blocks=4)
    engine.scheduler.add_request(make_request("runs", 14, max_tokens=2, ignore_eos=True))
    engine.step()
    engine.fetch("cat")
    assert engine.scheduler.next_deadline() == engine.clock.now_s + TIMEOUT_S
    engine.clock.now_s += TIMEOUT_S
    engine.scheduler.schedule()
    assert [fetched.reason for fetched in engine.told["cat"]] == ["the embeddings did not come in time"]


def test_a_want_without_room_is_answered_with_nothing_at_its_deadline() -> None:
    engine = make_engine(num_blocks=4)
    engine.kept_embeddings.put("cat", embeddings(BLOCK_BYTES))
    engine.fetch("dog")
    engine.fetch("bird")
    engine.step()
    assert engine.num_held_blocks == 2, "half of the pool"
    want = engine.want("cat")
    assert not engine.sent
    deadline_s = engine.clock.now_s + 10.0
    assert engine.transfers._wants[want.answer_key].deadline_s == deadline_s
    engine.clock.now_s = deadline_s
    engine.step()
    assert engine.sent == {want.answer_key: b""}


def test_a_fetch_past_its_deadline_keeps_its_blocks_until_it_has_drained() -> None:
    engine = make_engine()
    engine.fetch("cat")
    engine.step()
    engine.clock.now_s += TIMEOUT_S
    engine.step()
    engine.step()
    assert engine.cancelled == {engine.loading["cat"]}
    assert engine.num_held_blocks == 1
    assert engine.told["cat"] == []
    assert engine.scheduler.next_deadline() is None, "the link's own deadlines hold from here on"
    engine.receive("cat")
    assert [fetched.reason for fetched in engine.told["cat"]] == ["the embeddings did not come in time"]
    assert engine.num_held_blocks == 0


def test_a_cancel_in_each_state_gives_blocks_back_once() -> None:
    engine = make_engine(num_blocks=4)
    queued, loading, over = engine.fetch("cat"), engine.fetch("dog"), engine.fetch("bird")
    engine.transfers.cancel(queued)
    engine.transfers.cancel(queued)
    assert len(engine.told["cat"]) == 1
    engine.step()
    engine.transfers.cancel(loading)
    engine.transfers.cancel(loading)
    engine.receive("bird", bytes(BLOCK_BYTES))
    engine.transfers.cancel(over)
    assert engine.cancelled == {engine.loading["dog"]}
    engine.receive("dog", bytes(BLOCK_BYTES))
    assert engine.num_held_blocks == 0
    assert not engine.scheduler.has_requests()
    assert {image: len(told) for image, told in engine.told.items()} == {"cat": 1, "dog": 1, "bird": 1}


def test_reports_that_come_late_or_twice_are_counted_and_change_nothing() -> None:
    engine = make_engine()
    engine.fetch("cat")
    want = engine.want("cat")
    name = engine.loading["cat"]
    engine.receive("cat", bytes(BLOCK_BYTES))
    engine.end_sending(want.answer_key)
    engine.step(output_of(finished_recving={name: ReceivedKV(LoadOutcome.LOADED)}))
    engine.step(output_of(finished_sending={want.answer_key}))
    assert engine.scheduler.make_stats().num_late_completions == 2
    assert len(engine.told["cat"]) == 1
    assert engine.num_held_blocks == 0


def test_an_engine_without_links_says_so() -> None:
    scheduler = make_scheduler()
    told: list[Fetched] = []
    scheduler.remote.embeddings.begin(EmbeddingFetch(PEER, "cat", 1, 0.0, told.append))
    assert [fetched.data for fetched in told] == [None]


TURNS = st.lists(
    st.tuples(
        st.sampled_from(["request", "fetch", "want", "cancel", "abort", "wait", "reports"]),
        st.integers(0, 6),
        st.integers(1, 5 * BLOCK_BYTES),
    ),
    max_size=30,
)


@given(turns=TURNS, num_blocks=st.integers(8, 14))
@settings(deadline=None)
def test_whatever_comes_requests_are_served_and_every_block_is_back(
    turns: list[tuple[str, int, int]], num_blocks: int
) -> None:
    engine = make_engine(num_blocks=num_blocks, max_model_len=8 * BLOCK_SIZE)
    fetches: list[EmbeddingFetch] = []
    prompts: dict[str, list[int]] = {}
    for number, (what, choice, num_bytes) in enumerate(turns):
        if what == "request":
            request = make_request(str(number), 1 + num_bytes // 10, max_tokens=4)
            prompts[request.request_id] = list(request.prompt_token_ids)
            engine.scheduler.add_request(request)
        elif what == "fetch":
            fetches.append(engine.fetch(f"image-{number}", num_bytes))
        elif what == "want":
            if choice:
                engine.kept_embeddings.put(f"image-{number}", embeddings(num_bytes % 256))
            engine.want(f"image-{number}")
        elif what == "cancel" and fetches:
            engine.transfers.cancel(fetches[choice % len(fetches)])
        elif what == "abort" and prompts:
            aborted = sorted(prompts)[choice % len(prompts)]
            engine.scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
            del prompts[aborted]
        elif what == "wait":
            engine.clock.now_s += choice
        elif what == "reports":
            report_one(engine, is_whole=bool(choice % 2))
        engine.step()
    for _ in range(300):
        if not engine.scheduler.has_requests():
            break
        report_one(engine, is_whole=True)
        engine.step()
    assert not engine.scheduler.has_requests()
    assert engine.num_held_blocks == 0
    assert all(len(told) == 1 for told in engine.told.values())
    for request_id, prompt in prompts.items():
        assert engine.driver.tokens_of(request_id) == reference_tokens(prompt, 4)


def report_one(engine: Engine, *, is_whole: bool) -> None:
    if engine.loading:
        engine.receive(next(iter(engine.loading)), bytes(6 * BLOCK_BYTES) if is_whole else None)
    if engine.sent:
        engine.end_sending(next(iter(engine.sent)))
