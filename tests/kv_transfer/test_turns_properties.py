"""Many transfers on one link that may die: both ends' tables, whatever happens in whatever order.

Control messages and chunks are ordered each, and not with each other. A chunk's bytes are read when it leaves and
written when it arrives, maybe with a bit flipped; a producer's blocks are someone else's as soon as they are let go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from kv_transfer.agent.transfer_table import TransferTable
from kv_transfer.block_pieces import PieceMap
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.reports import LoadOutcome, ReceivedKV
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd, ProducerFinish, ProducerProgress, Reservation
from kv_transfer.handoff.control_messages import Cancel, Chunk, ChunkSum, Finished, Ready
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.checksum import checksum_of
from kv_transfer.links.control_streams import ControlStream
from kv_transfer.links.link_table import LinkTable
from kv_transfer.links.peer_link import LinkState, PeerLink
from kv_transfer.links.send_receive_thread import ChunkJob, DataThread
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from tests.kv_transfer.reported import Name, Reported

BLOCK_SIZE = 2
MAX_BLOCKS = 5
MAX_TRANSFERS = 8
LAYOUT = KVCacheLayout(MAX_BLOCKS * MAX_TRANSFERS, 1, 1, BLOCK_SIZE, 1, "float32", 4, "model")
PREFILL, DECODE = (EngineAddress(name, 1, name) for name in ("prefill", "decode"))
GARBAGE = -1.0
ENDS = (ProducerEnd.HANDED_OVER, ProducerEnd.HANDED_OVER, ProducerEnd.FINISHED_HERE)


class Wire:
    """One link: what was said and is not heard yet, and chunks at each of their three places."""

    def __init__(self, caches: tuple[Tensor, Tensor]) -> None:
        self.upward: deque[object] = deque()
        self.downward: deque[object] = deque()
        self.leaving: deque[object] = deque()
        self.flying: deque[list[Tensor]] = deque()
        self.receives: deque[object] = deque()
        self.producer = self._make_end(DECODE, caches[0], self.downward, self.leaving, is_producer=True)
        self.consumer = self._make_end(PREFILL, caches[1], self.upward, self.receives, is_producer=False)
        self.is_cut = False
        self.ends_that_know: list[PeerLink] = []

    def _make_end(
        self, peer: EngineAddress, cache: Tensor, says: deque[object], jobs: deque[object], *, is_producer: bool
    ) -> PeerLink:
        end = PeerLink(cast(ControlStream, Way(self, says)), is_producer, (peer.engine_id, 1), None, LinkState.OPEN)
        end.data = cast(DataThread, Way(self, jobs))
        end.pieces = PieceMap(LAYOUT, LAYOUT, cache, is_producer=True)
        return end

    def cut(self) -> None:
        self.is_cut = True
        for pending in (self.upward, self.downward, self.leaving, self.flying, self.receives):
            pending.clear()


@dataclass(frozen=True, slots=True)
class Way:
    """A stream's, or a data thread's, way in. After the cut everything is lost."""

    wire: Wire
    pending: deque[object]

    def send(self, message: object) -> None:
        if not self.wire.is_cut:
            self.pending.append(message)

    put = send


@dataclass(slots=True)
class Request:
    number: int
    num_blocks: int
    num_computed_blocks: int = 0
    is_ready: bool = False
    end: ProducerEnd | None = None
    is_let_go: bool = False
    """By the producer's table: its blocks there are someone else's."""
    failed: str = ""
    is_cancelled: bool = False
    received: ReceivedKV | None = None
    blocks: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        first = self.number * MAX_BLOCKS
        self.blocks = tuple(range(first, first + self.num_blocks))

    @property
    def name(self) -> str:
        return f"r{self.number}"

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * BLOCK_SIZE


class TurnsMachine(RuleBasedStateMachine):
    """Block b holds b at the producer once it is computed."""

    num_lost = 0

    @initialize(max_chunk_blocks=st.integers(1, 3), checksum=st.booleans())
    def start(self, max_chunk_blocks: int, checksum: bool) -> None:
        self.checksum = checksum
        config = KVTransferConfig(max_chunk_bytes=max_chunk_blocks * LAYOUT.block_size_bytes, checksum=checksum)
        self.caches = torch.full(LAYOUT.shape, GARBAGE), torch.full(LAYOUT.shape, GARBAGE)
        self.wires: list[Wire] = []
        self.prefill, self.decode = (TransferTable(config, LAYOUT, cast(LinkTable, self)) for _ in range(2))
        self.requests: list[Request] = []

    def to_producer(self, peer: EngineAddress) -> PeerLink:
        """See LinkTable."""
        if not self.wires or self.wires[-1].is_cut:
            self.wires.append(Wire(self.caches))
        return self.wires[-1].consumer

    # -- what schedulers do --------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.requests) < MAX_TRANSFERS)
    @rule(num_blocks=st.integers(1, MAX_BLOCKS))
    def begin(self, num_blocks: int) -> None:
        request = Request(len(self.requests), num_blocks)
        self.requests.append(request)
        producer = KVTransferParams(request.name, 0, TransferRole.PRODUCER, DECODE)
        consumer = KVTransferParams(request.name, 0, TransferRole.CONSUMER, PREFILL)
        reservation = Reservation(TransferKey.of_handoff(request.name), consumer, request.blocks, 0, request.num_tokens)
        self.prefill.on_step(
            KVConnectorMetadata(new_producers=((TransferKey.of_handoff(request.name), producer, request.num_tokens),)),
            0.0,
        )
        self.decode.on_step(KVConnectorMetadata(reservations=(reservation,)), 0.0)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0), num_blocks=st.integers(1, MAX_BLOCKS), end=st.sampled_from([*ENDS, None]))
    def compute(self, choice: int, num_blocks: int, end: ProducerEnd | None) -> None:
        """And end what is through, unless end is None."""
        request = self.running[choice % len(self.running)]
        request.num_computed_blocks = min(request.num_blocks, request.num_computed_blocks + num_blocks)
        for block in request.blocks[: request.num_computed_blocks]:
            self.caches[0][block] = block
        num_tokens = request.num_computed_blocks * BLOCK_SIZE
        self.prefill.on_computed(
            [ProducerProgress(TransferKey.of_handoff(request.name), request.blocks, 0, num_tokens)]
        )
        if end is not None and request.num_computed_blocks == request.num_blocks:
            self.end_request(request, end)

    @precondition(lambda self: any(r.end is None for r in self.requests))
    @rule(choice=st.integers(0), is_meant=st.integers(0, 3))
    def abort(self, choice: int, is_meant: int) -> None:
        """Abort a request that has been given up, or now and then another."""
        ending = [r for r in self.requests if r.end is None and (r.failed or is_meant == 0)]
        if ending:
            self.end_request(ending[choice % len(ending)], ProducerEnd.ABORTED)

    @precondition(lambda self: any(r.received is None for r in self.requests))
    @rule(choice=st.integers(0), is_meant=st.integers(0, 2))
    def cancel(self, choice: int, is_meant: int) -> None:
        loading = [r for r in self.requests if r.received is None]
        if is_meant == 0:
            request = loading[choice % len(loading)]
            request.is_cancelled = True
            self.decode.on_step(KVConnectorMetadata(consumer_cancels=(TransferKey.of_handoff(request.name),)), 0.0)

    @property
    def running(self) -> list[Request]:
        """The requests that are admitted and not through."""
        return [r for r in self.requests if r.is_ready and r.end is None and r.num_computed_blocks < r.num_blocks]

    def end_request(self, request: Request, end: ProducerEnd) -> None:
        request.end = end
        finish = ProducerFinish(
            TransferKey.of_handoff(request.name), end, 7 if end is ProducerEnd.HANDED_OVER else None
        )
        self.prefill.on_step(KVConnectorMetadata(producer_finishes=(finish,)), 0.0)

    # -- what links do -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.wires)
    @rule(choices=st.lists(st.integers(0, 5), min_size=1, max_size=8), is_flipped=st.sampled_from([False, False, True]))
    def some_things_move(self, choices: list[int], is_flipped: bool) -> None:
        events = self.events(is_flipped)
        for choice in choices:
            # The first that can happen, from the chosen one on.
            any(event() for event in events[choice:] + events[:choice])
            self.take_reports()

    def events(self, is_flipped: bool) -> list[Callable[[], bool]]:
        """Each returns whether there was anything to do."""
        return [
            self.deliver_upward,
            self.deliver_downward,
            self.chunk_leaves,
            lambda: self.chunk_arrives(is_flipped),
            lambda: self.hear_of_the_cut(is_producer=True),
            lambda: self.hear_of_the_cut(is_producer=False),
        ]

    def deliver_upward(self) -> bool:
        wire = self.find(lambda wire: bool(wire.upward))
        if wire is None:
            return False
        message = wire.upward.popleft()
        assert isinstance(message, Ready | Cancel)
        self.prefill.on_consumer_message(wire.producer, message, 0.0)
        return True

    def deliver_downward(self) -> bool:
        wire = self.find(lambda wire: bool(wire.downward))
        if wire is None:
            return False
        message = wire.downward.popleft()
        assert isinstance(message, Chunk | ChunkSum | Finished)
        self.decode.on_producer_message(wire.consumer, message, 0.0)
        return True

    def chunk_leaves(self) -> bool:
        wire = self.find(lambda wire: bool(wire.leaving))
        if wire is None:
            return False
        job = cast(ChunkJob, wire.leaving.popleft())
        assert not any(block.eq(GARBAGE).any() for block in job.blocks), "a block that is someone else's left"
        wire.flying.append([block.clone() for block in job.blocks])
        self.prefill.on_chunk_moved(wire.producer, self.summed(job), 0.0)
        return True

    def chunk_arrives(self, is_flipped: bool) -> bool:
        wire = self.find(lambda wire: bool(wire.flying and wire.receives))
        if wire is None:
            return False
        job = cast(ChunkJob, wire.receives.popleft())
        assert self.requests[int(str(job.transfer_id)[1:])].received is None, (
            "a reported transfer's blocks were written"
        )
        for target, source in zip(job.blocks, wire.flying.popleft(), strict=True):
            target.copy_(source)
        if is_flipped and self.checksum:
            job.blocks[0].view(-1)[0] = float("nan")
        self.decode.on_chunk_moved(wire.consumer, self.summed(job), 0.0)
        return True

    @precondition(lambda self: self.wires)
    @rule(is_meant=st.integers(0, 5))
    def cut(self, is_meant: int) -> None:
        if is_meant == 0:
            self.wires[-1].cut()

    def hear_of_the_cut(self, is_producer: bool) -> bool:
        for wire in self.wires:
            end = wire.producer if is_producer else wire.consumer
            if wire.is_cut and end not in wire.ends_that_know:
                wire.ends_that_know.append(end)
                end.state, end.reason = LinkState.DEAD, "cut"
                (self.prefill if is_producer else self.decode).on_link_dead(end)
                return True
        return False

    def find(self, has_some: Callable[[Wire], bool]) -> Wire | None:
        return next((wire for wire in self.wires if has_some(wire)), None)

    def summed(self, job: ChunkJob) -> ChunkJob:
        checksum = checksum_of(job.blocks) if self.checksum else None
        return ChunkJob(job.transfer_id, job.blocks, None, None, job.attempt, job.index, checksum)

    # -- what comes of it ----------------------------------------------------------------------------------------

    @invariant()
    def take_reports(self) -> None:
        of_name: dict[Name, Request] = {request.name: request for request in self.requests}
        sent = Reported.of(self.prefill.take_output(num_links=1))
        for name in sent.ready_to_prefill:
            of_name[name].is_ready = True
        for name, reason in sent.failed_sending.items():
            of_name[name].failed = reason
        for name in sent.finished_sending:
            request = of_name[name]
            assert request.end is not None
            assert not request.is_let_go
            request.is_let_go = True
            self.caches[0][list(request.blocks)] = GARBAGE
        for name, received in Reported.of(self.decode.take_output(num_links=1)).finished_recving.items():
            request = of_name[name]
            assert request.received is None
            request.received = received
            self.check_received(request, received)

    def check_received(self, request: Request, received: ReceivedKV) -> None:
        valid = list(request.blocks[: received.num_valid_tokens // BLOCK_SIZE])
        assert self.caches[1][valid].flatten(1).eq(torch.tensor(valid)[:, None]).all()
        assert self.caches[1][list(request.blocks)].isfinite().all()
        if received.outcome is LoadOutcome.LOADED:
            assert (request.end, len(valid)) == (ProducerEnd.HANDED_OVER, request.num_blocks)
            assert not request.is_cancelled
        elif received.outcome is LoadOutcome.FAILED:
            assert received.reason
        else:
            assert request.is_cancelled or request.end is ProducerEnd.FINISHED_HERE

    def teardown(self) -> None:
        if not hasattr(self, "requests"):
            return
        self.settle()
        for request in self.requests:
            if request.end is None:
                self.end_request(request, ProducerEnd.ABORTED)
        self.settle()
        assert all(request.is_let_go and request.received is not None for request in self.requests)
        for table in (self.prefill, self.decode):
            stats = table.take_output(num_links=1).stats
            assert stats is not None
            assert (stats.num_active_transfers, stats.num_pinned_blocks, stats.oldest_pin_at_s) == (0, 0, None)
            assert table.next_deadline() is None
        for wire in self.wires:
            assert (wire.producer.num_transfers, wire.consumer.num_transfers) == (0, 0)
            assert [*wire.leaving, *wire.flying, *wire.receives] == []

    def settle(self) -> None:
        while any(event() for event in self.events(is_flipped=False)):
            self.take_reports()
        self.take_reports()


TestTurns = TurnsMachine.TestCase
TestTurns.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
