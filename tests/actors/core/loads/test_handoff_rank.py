"""Handoffs go from a lower to a higher rank only; what is refused is computed by one engine."""

from __future__ import annotations

from dataclasses import replace

from actors.core.requests.request import FinishReason, Request, RequestStatus
from kv_transfer.connector.reports import LoadOutcome, ReceivedKV
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.params import HandoffRanks, TransferRole
from tests.actors.core.builders import make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector, reference_tokens
from tests.kv_transfer.reported import output_of

PROMPT = list(range(1, 10))


def make_end(name: str, role: TransferRole, producer: int, consumer: int) -> Request:
    request = make_request(name, PROMPT, role=role, max_tokens=3, ignore_eos=True)
    assert request.kv_transfer_params is not None
    request.kv_transfer_params = replace(request.kv_transfer_params, ranks=HandoffRanks(producer, consumer))
    return request


def make_driver() -> tuple[Driver, FakeConnector]:
    connector = FakeConnector()
    return Driver(make_scheduler(connector=connector)), connector


def test_a_consumer_refuses_a_handoff_from_a_rank_that_is_not_lower_and_does_all_of_it() -> None:
    driver, connector = make_driver()
    driver.scheduler.add_request(make_end("down", TransferRole.CONSUMER, 5, 3))
    driver.scheduler.add_request(make_end("level", TransferRole.CONSUMER, 3, 3))
    driver.run()
    for name in ("down", "level"):
        assert driver.tokens_of(name) == reference_tokens(PROMPT, 3, eos=-1)
        assert driver.end_of(name).finish_reason is FinishReason.LENGTH
    assert connector.roles == {}
    assert driver.scheduler.make_stats().num_refused_handoffs == 2


def test_a_producer_of_a_rank_that_is_not_lower_ends_and_its_consumer_is_told() -> None:
    driver, connector = make_driver()
    driver.scheduler.add_request(make_end("down", TransferRole.PRODUCER, 5, 3))
    driver.step()
    end = driver.end_of("down")
    assert end.finish_reason is FinishReason.ERROR
    assert end.error == "handoff refused: a handoff has to go to a higher rank, and this one goes from 5 to 3"
    assert connector.finished == [("down", ProducerEnd.ABORTED, None)]


def test_an_engine_keeps_its_rank_while_it_has_a_load() -> None:
    """A ticket from before a switch of roles, and one from after it, would make a circle."""
    driver, connector = make_driver()
    driver.scheduler.add_request(make_end("before", TransferRole.CONSUMER, 1, 2))
    driver.step()
    driver.scheduler.add_request(make_end("after", TransferRole.PRODUCER, 0, 1))
    driver.step()
    assert driver.end_of("after").error == (
        "handoff refused: this engine has handoff rank 2 until its transfers end, but the ticket says 0"
    )
    driver.scheduler.add_request(make_end("same", TransferRole.PRODUCER, 2, 3))
    assert connector.roles["same"] is TransferRole.PRODUCER
    driver.scheduler.finish_requests("same", RequestStatus.FINISHED_ABORTED)
    driver.step(output_of(finished_recving={"before": ReceivedKV(LoadOutcome.RELEASED)}))
    driver.scheduler.add_request(make_end("now", TransferRole.PRODUCER, 0, 1))
    driver.step()
    assert "now" in driver.scheduler.requests


def test_an_engine_keeps_its_rank_until_what_it_sends_has_left() -> None:
    driver, connector = make_driver()
    driver.scheduler.add_request(make_end("sent", TransferRole.PRODUCER, 1, 2))
    driver.step(output_of(ready_to_prefill={"sent"}))
    driver.run_until_finished("sent")
    assert "sent" in driver.scheduler.remote.held
    driver.scheduler.add_request(make_end("early", TransferRole.CONSUMER, 1, 4))
    assert "early" not in connector.roles
    driver.step(output_of(finished_sending={"sent"}))
    driver.scheduler.add_request(make_end("late", TransferRole.CONSUMER, 1, 4))
    assert connector.roles["late"] is TransferRole.CONSUMER
