"""One rank cuts requests into transfers with the peer's ranks, and reports whole requests.

Tests of kv_transfer/connector/reports.py, kv_transfer/connector/steps.py, kv_transfer/params.py.
"""

from __future__ import annotations

from dataclasses import replace

from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.reports import KVConnectorOutput, LoadOutcome, ReceivedKV
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd, ProducerFinish, ProducerProgress, Reservation
from kv_transfer.params import EngineAddress, KVTransferParams, TransferPart, TransferRole
from kv_transfer.sides.rank_parts import RankParts
from kv_transfer.transfer_stats import TransferStats
from tests.kv_transfer.connected_workers import LAYOUT
from tests.kv_transfer.reported import Reported, output_of

R = TransferKey.of_handoff("r")
ONE = EngineAddress("e", 5, "h:1")
FOUR = EngineAddress("e", 5, "h:1", ("h:2", "h:3", "i:4"))
TWO_HEADS = LAYOUT
ONE_OF_TWO = replace(LAYOUT, num_kv_heads=1, tp_size=2)
FINISH = ProducerFinish(TransferKey.of_handoff("r"), ProducerEnd.HANDED_OVER, 7)


class Pairs:
    """Records what a rank was asked for; the test sets what it reports."""

    def __init__(self) -> None:
        self.started: list[KVConnectorMetadata] = []
        self.finished: list[KVConnectorMetadata] = []
        self.output = KVConnectorOutput()
        self.is_shut_down = False

    def start_step(self, metadata: KVConnectorMetadata) -> None:
        self.started.append(metadata)

    def finish_step(self, metadata: KVConnectorMetadata) -> None:
        self.finished.append(metadata)

    def take_output(self) -> KVConnectorOutput:
        output, self.output = self.output, KVConnectorOutput()
        return output

    def shutdown(self) -> None:
        self.is_shut_down = True


def ticket(role: TransferRole, peer: EngineAddress) -> KVTransferParams:
    return KVTransferParams("t", 3, role, peer)


def test_a_rank_is_an_engine_of_its_own_to_its_peers() -> None:
    assert ONE.of_rank(0) is ONE
    assert (ONE.tp_size, FOUR.tp_size) == (1, 4)
    assert [FOUR.of_rank(rank) for rank in (0, 3)] == [EngineAddress("e/0", 5, "h:1"), EngineAddress("e/3", 5, "i:4")]


def test_a_producer_sends_to_every_rank_that_wants_its_heads_and_waits_for_all() -> None:
    pairs = Pairs()
    rank = RankParts(pairs, TWO_HEADS)
    progress = ProducerProgress(TransferKey.of_handoff("r"), (4, 5), 0, 8)
    step = KVConnectorMetadata(
        new_producers=((TransferKey.of_handoff("r"), ticket(TransferRole.PRODUCER, FOUR), 10),), progress=(progress,)
    )
    rank.start_step(step)
    rank.finish_step(step)
    parts = pairs.started[0].new_producers
    assert [(part, params.transfer_id, params.peer.engine_id, n) for part, params, n in parts] == [
        (R.of_part(peer), TransferPart("t", 0, peer), f"e/{peer}", 10) for peer in range(4)
    ]
    assert {params.attempt for _, params, _ in parts} == {3}
    assert pairs.finished[0].progress == tuple(replace(progress, key=R.of_part(peer)) for peer in range(4))

    pairs.output = output_of(ready_to_prefill={R.of_part(rank) for rank in (0, 1, 3)})
    pairs.output.stats = TransferStats(num_links=4)
    output = rank.take_output()
    assert output.is_empty()
    assert output.stats == TransferStats(num_links=4)
    pairs.output = output_of(ready_to_prefill={R.of_part(2)})
    assert Reported.of(rank.take_output()).ready_to_prefill == {"r"}
    rank.start_step(KVConnectorMetadata(producer_finishes=(FINISH,)))
    assert [finish.key for finish in pairs.started[1].producer_finishes] == [R.of_part(peer) for peer in range(4)]
    pairs.output = output_of(finished_sending={R.of_part(peer) for peer in range(4)})
    assert Reported.of(rank.take_output()).finished_sending == {"r"}


def test_a_replica_that_nobody_takes_heads_from_waits_for_nothing() -> None:
    pairs = Pairs()
    replica = RankParts(pairs, replace(LAYOUT, num_kv_heads=1, tp_size=4, tp_rank=1, num_replicas=2))
    replica.start_step(
        KVConnectorMetadata(new_producers=((TransferKey.of_handoff("r"), ticket(TransferRole.PRODUCER, ONE), 10),))
    )
    assert pairs.started[0].is_empty()
    assert Reported.of(replica.take_output()).ready_to_prefill == {"r"}
    replica.start_step(KVConnectorMetadata(producer_finishes=(FINISH,)))
    assert pairs.started[1].is_empty()
    assert Reported.of(replica.take_output()).finished_sending == {"r"}
    assert replica.take_output().is_empty()


def test_a_consumer_takes_each_head_from_one_rank_and_reports_once() -> None:
    pairs = Pairs()
    rank = RankParts(pairs, TWO_HEADS)
    reservation = Reservation(TransferKey.of_handoff("r"), ticket(TransferRole.CONSUMER, FOUR), (1, 2), 1, 10)
    rank.start_step(
        KVConnectorMetadata(reservations=(reservation,), consumer_cancels=(TransferKey.of_handoff("unknown"),))
    )
    assert [(r.key, r.params.transfer_id, r.params.peer) for r in pairs.started[0].reservations] == [
        (R.of_part(0), TransferPart("t", 0, 0), FOUR.of_rank(0)),
        (R.of_part(2), TransferPart("t", 2, 0), FOUR.of_rank(2)),
    ]
    assert pairs.started[0].consumer_cancels == ()
    pairs.output = output_of(finished_recving={R.of_part(2): ReceivedKV(LoadOutcome.LOADED, 10, 7)})
    assert rank.take_output().is_empty()
    rank.start_step(KVConnectorMetadata(consumer_cancels=(TransferKey.of_handoff("r"),)))
    assert pairs.started[1].consumer_cancels == (R.of_part(0), R.of_part(2))
    pairs.output = output_of(finished_recving={R.of_part(0): ReceivedKV(LoadOutcome.CANCELLED, 4)})
    assert Reported.of(rank.take_output()).finished_recving == {"r": ReceivedKV(LoadOutcome.CANCELLED, 4)}
    rank.start_step(KVConnectorMetadata(consumer_cancels=(TransferKey.of_handoff("r"),)))
    assert pairs.started[2].is_empty(), "a request that was reported is forgotten"


def test_both_ends_name_a_part_alike() -> None:
    transfer_ids = []
    for layout, role, peer in (
        (replace(ONE_OF_TWO, tp_rank=1), TransferRole.PRODUCER, ONE),
        (TWO_HEADS, TransferRole.CONSUMER, EngineAddress("p", 1, "h:1", ("h:2",))),
    ):
        pairs = Pairs()
        rank = RankParts(pairs, layout)
        if role is TransferRole.PRODUCER:
            rank.start_step(KVConnectorMetadata(new_producers=((TransferKey.of_handoff("r"), ticket(role, peer), 10),)))
            transfer_ids.append(pairs.started[0].new_producers[0][1].transfer_id)
        else:
            reservation = Reservation(TransferKey.of_handoff("r"), ticket(role, peer), (1,), 0, 4)
            rank.start_step(KVConnectorMetadata(reservations=(reservation,)))
            transfer_ids.append(pairs.started[0].reservations[1].params.transfer_id)
    assert transfer_ids == [TransferPart("t", 1, 0)] * 2


def test_shutdown_reaches_the_links() -> None:
    pairs = Pairs()
    RankParts(pairs, LAYOUT).shutdown()
    assert pairs.is_shut_down
