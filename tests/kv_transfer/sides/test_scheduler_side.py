"""The scheduler's side of the connector: what it answers, what it passes down once, and what it holds."""

from __future__ import annotations

import pytest

from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.keys import TransferKey
from kv_transfer.connector.reports import LoadOutcome, ReceivedKV
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd, ProducerFinish, ProducerProgress, Reservation
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from kv_transfer.sides.scheduler_side import SchedulerSide
from tests.kv_transfer.reported import output_of

PEER = EngineAddress("peer", 1, "peer:1")
PRODUCER = KVTransferParams("t", 0, TransferRole.PRODUCER, PEER)
CONSUMER = KVTransferParams("t", 0, TransferRole.CONSUMER, PEER)


def new_connector(max_reserved_requests: int = 2) -> SchedulerSide:
    return SchedulerSide(KVTransferConfig(max_reserved_requests=max_reserved_requests), block_size=4)


def reserve(connector: SchedulerSide, request_id: str) -> None:
    connector.on_new_request(request_id, CONSUMER, 10)
    connector.update_state_after_alloc(request_id, [1, 2, 3], 0)


def report(connector: SchedulerSide, request_id: str) -> None:
    connector.update_connector_output(output_of(finished_recving={request_id: ReceivedKV(LoadOutcome.FAILED)}))


def test_a_request_without_a_ticket_is_none_of_its_business() -> None:
    connector = new_connector()
    assert connector.get_num_new_matched_tokens("r", 4) == 0
    assert not connector.request_finished("r", ProducerEnd.ABORTED)
    assert connector.build_connector_meta([]).is_empty()


def test_a_producer_waits_for_ready() -> None:
    connector = new_connector()
    connector.on_new_request("r", PRODUCER, 10)
    assert connector.get_num_new_matched_tokens("r", 0) is None
    connector.update_connector_output(output_of(ready_to_prefill={"r", "unknown"}))
    assert connector.get_num_new_matched_tokens("r", 0) == 0


def test_metadata_is_passed_down_once() -> None:
    connector = new_connector()
    connector.on_new_request("p", PRODUCER, 10)
    assert connector.build_connector_meta([]) == KVConnectorMetadata(
        new_producers=((TransferKey.of_handoff("p"), PRODUCER, 10),)
    )
    assert connector.build_connector_meta([]).is_empty()


def test_progress_goes_down_with_the_step() -> None:
    progress = ProducerProgress(TransferKey.of_handoff("p"), (1, 2), 0, 8)
    assert new_connector().build_connector_meta([progress]) == KVConnectorMetadata(progress=(progress,))


@pytest.mark.parametrize(("num_local_tokens", "num_local_blocks"), [(0, 0), (4, 1), (8, 2), (10, 3)])
def test_a_consumer_loads_what_is_not_here(num_local_tokens: int, num_local_blocks: int) -> None:
    connector = new_connector()
    connector.on_new_request("c", CONSUMER, 10)
    assert connector.build_connector_meta([]).is_empty(), "nothing is reserved yet"
    assert connector.get_num_new_matched_tokens("c", num_local_tokens) == 10 - num_local_tokens
    connector.update_state_after_alloc("c", [7, 8, 9], num_local_tokens)
    reservation = Reservation(TransferKey.of_handoff("c"), CONSUMER, (7, 8, 9), num_local_blocks, 10)
    assert connector.build_connector_meta([]) == KVConnectorMetadata(reservations=(reservation,))


def test_so_many_loads_are_in_transfer_and_no_more() -> None:
    connector = new_connector(max_reserved_requests=2)
    reserve(connector, "a")
    reserve(connector, "b")
    connector.on_new_request("c", CONSUMER, 10)
    assert connector.get_num_new_matched_tokens("c", 0) is None
    report(connector, "a")
    assert connector.get_num_new_matched_tokens("c", 0) == 10


def test_a_finished_load_still_counts_until_its_report() -> None:
    connector = new_connector(max_reserved_requests=1)
    reserve(connector, "a")
    assert connector.request_finished("a", ProducerEnd.ABORTED)
    connector.on_new_request("b", CONSUMER, 10)
    assert connector.get_num_new_matched_tokens("b", 0) is None
    report(connector, "a")
    report(connector, "a")
    assert connector.get_num_new_matched_tokens("b", 0) == 10


@pytest.mark.parametrize("end", list(ProducerEnd))
def test_a_producers_blocks_are_held_and_its_end_goes_down(end: ProducerEnd) -> None:
    connector = new_connector()
    connector.on_new_request("p", PRODUCER, 10)
    connector.build_connector_meta([])
    token_id = 42 if end is ProducerEnd.HANDED_OVER else None
    assert connector.request_finished("p", end, token_id)
    assert connector.build_connector_meta([]) == KVConnectorMetadata(
        producer_finishes=(ProducerFinish(TransferKey.of_handoff("p"), end, token_id),)
    )
    assert not connector.request_finished("p", end), "it is held once"


def test_a_consumer_that_ends_during_its_load_is_held_and_cancelled() -> None:
    connector = new_connector()
    reserve(connector, "c")
    connector.build_connector_meta([])
    assert connector.request_finished("c", ProducerEnd.ABORTED)
    assert connector.build_connector_meta([]) == KVConnectorMetadata(consumer_cancels=(TransferKey.of_handoff("c"),))


def test_a_consumer_that_ends_before_its_load_is_not_held() -> None:
    connector = new_connector()
    connector.on_new_request("c", CONSUMER, 10)
    assert not connector.request_finished("c", ProducerEnd.ABORTED)
    assert connector.build_connector_meta([]).is_empty()


def test_a_consumer_that_ends_after_its_load_is_not_held() -> None:
    connector = new_connector()
    reserve(connector, "c")
    report(connector, "c")
    connector.build_connector_meta([])
    assert not connector.request_finished("c", ProducerEnd.ABORTED)
    assert connector.build_connector_meta([]).is_empty()
    assert connector.get_num_new_matched_tokens("c", 0) == 0, "recomputed like any other"


def test_a_load_that_takes_too_long_is_cancelled_and_reported_once() -> None:
    connector = new_connector(max_reserved_requests=1)
    reserve(connector, "c")
    connector.build_connector_meta([])
    connector.cancel_load("c")
    assert connector.build_connector_meta([]) == KVConnectorMetadata(consumer_cancels=(TransferKey.of_handoff("c"),))
    report(connector, "c")
    assert not connector.request_finished("c", ProducerEnd.ABORTED)
