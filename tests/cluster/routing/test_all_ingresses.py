from __future__ import annotations

import pytest

from cluster.routing.all_ingresses import MAX_FACTOR, AllIngresses
from cluster.routing.load_book import LoadBook, SentWork
from tests.cluster.routing.cost_setup import Clock, engine


def _noted(*reports: tuple[int, int], every_s: float = 0.5) -> AllIngresses:
    found = AllIngresses()
    for number, (num_own, num_all) in enumerate(reports):
        found.note(num_own, num_all, number * every_s)
    return found


def test_alone_a_request_stands_for_itself() -> None:
    assert AllIngresses().factor == 1
    assert _noted(*[(10, 10)] * 50).factor == 1


def test_one_of_three_equal_ingresses_counts_each_of_its_requests_for_three() -> None:
    assert _noted(*[(10, 30)] * 50).factor == pytest.approx(3, rel=0.1)


def test_a_few_requests_of_others_mean_little() -> None:
    assert _noted((0, 3)).factor < 1.4


def test_what_was_sent_long_ago_counts_no_more() -> None:
    found = _noted(*[(10, 100)] * 50)
    for number in range(200):
        found.note(10, 10, 25 + number * 0.5)
    assert found.factor == pytest.approx(1, abs=0.01)


def test_counts_that_make_no_sense_change_nothing() -> None:
    assert _noted((-5, -7), (3, 0)).factor == 1
    assert _noted((0, 10**9)).factor == MAX_FACTOR


def test_until_the_next_report_a_request_counts_for_those_that_other_ingresses_have_sent_meanwhile() -> None:
    one, clock = engine("both-0"), Clock()
    book = LoadBook(clock)
    book.note_report(one)
    for number in range(1, 60):
        clock.now_s += 0.5
        one.num_submitted_requests += 5
        one.reports(num_taken_from_all=20 * number)
        book.note_report(one)
    work = book.work_of(one.descriptor)
    sent = SentWork(num_computed_tokens=100, prefill_s=0.5, num_context_tokens=100)
    one.num_submitted_requests += 1
    book.note_sent(one.descriptor, "r", sent)
    assert work.num_decodes == pytest.approx(4, rel=0.1)
    assert work.num_context_tokens == pytest.approx(400, rel=0.1)
    assert work.queue_end_s - clock() == pytest.approx(2.0, rel=0.1)
    one.reports(num_taken_from_all=20 * 60, num_decodes=1, num_decode_context_tokens=100)
    book.note_report(one)
    assert (work.num_decodes, work.num_context_tokens) == (1, 100), "the report has all that was sent"
    one.num_submitted_requests += 1
    book.note_sent(one.descriptor, "s", sent)
    book.note_left(one.descriptor.key, "s")
    assert work.num_decodes == pytest.approx(1)
    assert work.num_context_tokens == pytest.approx(100)
    assert work.num_free_blocks == pytest.approx(10_000)
    book.note_left(one.descriptor.key, "r")
    assert work.num_decodes == pytest.approx(0)
