import gc

import pytest

from actors.core.outputs.sent_work import SentWork
from cluster.routing.load_book import LoadBook
from cluster.routing.reported_work import DEFAULT_BYTES_PER_S, DEFAULT_ROUND_TRIP_S, EngineWork
from kv_transfer.link_load import LinkLoad
from tests.cluster.routing.cost_setup import BLOCK_SIZE, Clock, FakeEngine, cost_model, engine

_DECODES = SentWork(num_computed_tokens=100, prefill_s=0.5, num_context_tokens=100)


def _book(*engines: FakeEngine) -> tuple[LoadBook, Clock]:
    clock = Clock()
    book = LoadBook(clock)
    for one in engines:
        book.note_report(one)
    return book, clock


def _send(book: LoadBook, one: FakeEngine, request_id: str, sent: SentWork = _DECODES) -> None:
    one.num_submitted_requests += 1
    book.note_sent(one.descriptor, request_id, sent)


def test_an_engine_that_has_not_reported_is_idle_and_its_report_infinitely_old() -> None:
    one = engine("both-0")
    book, _ = _book()
    work = book.work_of(one.descriptor)
    assert (work.num_decodes, work.queue_end_s, work.prediction) == (0, 0.0, None)
    assert book.age_s(one.descriptor.key) == float("inf")
    assert work.link_to("x").bytes_per_s == DEFAULT_BYTES_PER_S


def test_the_work_is_the_report_and_what_was_sent_since() -> None:
    one = engine("both-0", num_decodes=3, num_decode_context_tokens=3000, num_free_blocks=50)
    book, clock = _book(one)
    work = book.work_of(one.descriptor)
    assert (work.num_decodes, work.num_context_tokens, work.num_free_blocks) == (3, 3000, 50)
    _send(book, one, "a")
    assert (work.num_decodes, work.num_context_tokens) == (4, 3100)
    assert work.num_free_blocks == 50 - 7, "101 tokens in blocks of 16"
    assert work.queue_end_s == clock() + 0.5


def test_recurrent_states_take_blocks_of_every_request_that_has_none_yet() -> None:
    one = engine("both-0", num_free_blocks=500, num_state_blocks=20, num_waiting_slots=3, num_waiting_tokens=160)
    book, _ = _book(one)
    work = book.work_of(one.descriptor)
    assert work.num_free_blocks == 500 - 10 - 3 * 20
    _send(book, one, "a")
    assert work.num_free_blocks == 430 - 7 - 20
    assert book.num_blocks_sent(one.descriptor.key) == 27
    book.note_sent(one.descriptor, "elsewhere", SentWork())
    assert work.num_free_blocks == 430 - 27, "neither end of it is here"
    book.note_left(one.descriptor.key, "a")
    assert work.num_free_blocks == 430


def test_a_request_that_a_report_counts_is_not_added_again() -> None:
    one = engine("both-0")
    book, _ = _book(one)
    for number in range(5):
        _send(book, one, f"r{number}")
    one.reports(
        num_decodes=2,
        num_decode_context_tokens=200,
        num_coming_decodes=1,
        num_coming_context_tokens=100,
        num_taken_requests=3,
    )
    book.note_report(one)
    work = book.work_of(one.descriptor)
    assert (work.num_decodes, work.num_context_tokens) == (5, 500)
    one.reports(num_decodes=5, num_decode_context_tokens=505)
    book.note_report(one)
    assert (work.num_decodes, work.num_context_tokens) == (5, 505)


def test_requests_that_wait_at_the_engine_count_as_decodes_whichever_ingress_has_sent_them() -> None:
    one = engine("both-0")
    book, clock = _book(one)
    _send(book, one, "a")
    one.reports(num_decodes=1, num_waiting_tokens=300, num_coming_decodes=3, num_coming_context_tokens=300)
    book.note_report(one)
    work = book.work_of(one.descriptor)
    assert (work.num_decodes, work.num_context_tokens) == (4, 1300)
    assert work.queue_end_s > clock()


def test_what_another_ingress_has_sent_counts_until_a_report_has_it() -> None:
    one = engine("both-0", num_taken_from_all=10)
    book, clock = _book(one)
    work = book.work_of(one.descriptor)
    free = work.num_free_blocks
    book.note_announced(one, 12, [_DECODES, _DECODES])
    assert (work.num_decodes, work.num_coming_decodes, work.num_context_tokens) == (2, 2, 200)
    assert work.num_free_blocks == free - 14
    assert book.num_blocks_sent(one.descriptor.key) == 14
    assert work.queue_end_s == clock() + 1.0
    one.reports(num_taken_from_all=11, num_decodes=1, num_decode_context_tokens=100)
    book.note_report(one)
    assert (work.num_decodes, work.num_context_tokens) == (3, 300), "both were announced as the twelfth"
    one.reports(num_taken_from_all=12, num_decodes=2, num_decode_context_tokens=200)
    book.note_report(one)
    assert (work.num_decodes, work.num_context_tokens) == (2, 200)
    book.note_announced(one, 12, [_DECODES])
    assert work.num_decodes == 2, "the report has come first"


def test_what_has_left_of_another_ingress_counts_no_more() -> None:
    one = engine("both-0", num_decodes=2, num_decode_context_tokens=200, num_taken_from_all=2)
    book, _ = _book(one)
    work = book.work_of(one.descriptor)
    free = work.num_free_blocks
    book.note_announced(one, 3, [_DECODES])
    book.note_announced(one, 3, [], [_DECODES])
    assert (work.num_decodes, work.num_context_tokens, work.num_free_blocks) == (2, 200, free)
    assert not work.announced
    book.note_announced(one, 3, [], [_DECODES, _DECODES, _DECODES])
    assert (work.num_decodes, work.num_context_tokens) == (0, 0)
    assert work.num_free_blocks == free, "the report has counted their blocks"


def test_what_leaves_is_announced_if_it_decoded() -> None:
    one = engine("prefill-0")
    book, _ = _book(one)
    _send(book, one, "a")
    _send(book, one, "prompt", SentWork(num_computed_tokens=100, prefill_s=0.5))
    for name in ("prompt", "a", "a"):
        book.note_left(one.descriptor.key, name)
    assert one.left == [_DECODES]


def test_a_link_is_as_full_as_all_ingresses_make_it() -> None:
    one = engine("prefill-0")
    book, _ = _book(one)
    book.note_announced(one, 1, [SentWork(10, 0.1, consumer="decode-0", num_handoff_bytes=500)])
    assert book.work_of(one.descriptor).link_to("decode-0").num_queued_bytes == 500


def test_what_is_sent_is_announced() -> None:
    one = engine("both-0")
    book, _ = _book(one)
    _send(book, one, "a")
    assert one.announced == [_DECODES]


def test_what_was_announced_to_an_earlier_session_counts_no_more() -> None:
    one = engine("both-0")
    book, _ = _book(one)
    work = book.work_of(one.descriptor)
    book.note_announced(one, 5, [_DECODES])
    again = engine("both-0")
    book.note_announced(again, 6, [_DECODES])
    assert work.num_decodes == 1, "a session that has not reported is not known yet"
    again.reports()
    book.note_report(again)
    assert work.num_decodes == 0


def test_a_request_that_has_left_counts_no_more_before_the_next_report() -> None:
    one = engine("both-0")
    book, _ = _book(one)
    work = book.work_of(one.descriptor)
    _send(book, one, "counted")
    one.reports(num_decodes=1, num_decode_context_tokens=100)
    book.note_report(one)
    _send(book, one, "since")
    assert work.num_decodes == 2
    free = work.num_free_blocks
    book.note_left(one.descriptor.key, "since")
    book.note_left(one.descriptor.key, "since")
    assert (work.num_decodes, work.num_context_tokens) == (1, 100)
    assert work.num_free_blocks == free + 7
    book.note_left(one.descriptor.key, "counted")
    assert (work.num_decodes, work.num_context_tokens) == (0, 0)


def test_the_queue_is_worked_off_while_no_report_comes() -> None:
    one = engine("prefill-0", num_waiting_tokens=10_000)
    book, clock = _book(one)
    work = book.work_of(one.descriptor)
    wait_s = work.queue_end_s - clock()
    assert wait_s > 1.0
    clock.now_s += wait_s + 5
    _send(book, one, "a")
    assert work.queue_end_s == clock() + 0.5
    assert book.age_s(one.descriptor.key) == pytest.approx(wait_s + 5)


def test_a_queue_twice_as_long_takes_twice_the_time_beside_the_same_decodes() -> None:
    long, short = engine("both-0", num_waiting_tokens=40_960), engine("both-1", num_prefill_tokens=20_480)
    book, clock = _book(long, short)
    ends = [book.work_of(one.descriptor).queue_end_s - clock() for one in (long, short)]
    assert ends[0] == pytest.approx(2 * ends[1])


@pytest.mark.parametrize("describes_in_s", [-0.25, 0.0, 0.25])
def test_a_queue_ends_earlier_by_the_age_of_what_is_reported(describes_in_s: float) -> None:
    one = engine("both-0", num_waiting_tokens=20_480)
    book, clock = _book(one)
    before_s = book.work_of(one.descriptor).wait_s(clock())
    one.reports(num_waiting_tokens=20_480, describes_in_s=describes_in_s)
    book.note_report(one)
    assert book.work_of(one.descriptor).wait_s(clock()) == pytest.approx(before_s + describes_in_s)


def test_what_was_sent_since_does_not_begin_before_a_report_of_an_engine_that_was_idle_long_ago() -> None:
    one = engine("both-0")
    book, clock = _book(one)
    _send(book, one, "a")
    one.reports(num_taken_requests=0, num_taken_from_all=0, describes_in_s=-20.0)
    book.note_report(one)
    assert book.work_of(one.descriptor).wait_s(clock()) == pytest.approx(0.5)


def test_an_older_report_changes_nothing() -> None:
    one = engine("both-0", num_decodes=3)
    book, clock = _book(one)
    clock.now_s += 1
    book.note_report(one)
    assert book.age_s(one.descriptor.key) == 1


def test_in_a_new_session_the_requests_of_the_earlier_one_are_gone() -> None:
    one = engine("both-0")
    book, _ = _book(one)
    _send(book, one, "a")
    again = engine("both-0")
    book.note_report(again)
    assert book.work_of(one.descriptor).num_decodes == 0


def test_bytes_of_a_handoff_queue_on_the_link_until_the_next_report() -> None:
    link = LinkLoad("decode-0", num_queued_bytes=1000, bytes_per_s=1e6, round_trip_s=0.25)
    one = engine("prefill-0", links=(link, LinkLoad("decode-1", 7)))
    book, _ = _book(one)
    work = book.work_of(one.descriptor)
    _send(book, one, "a", SentWork(10, 0.1, consumer="decode-0", num_handoff_bytes=500))
    assert work.link_to("decode-0").num_queued_bytes == 1500
    unmeasured = work.link_to("decode-1")
    assert (unmeasured.bytes_per_s, unmeasured.round_trip_s) == (1e6, DEFAULT_ROUND_TRIP_S), "as fast as the other one"
    one.reports(links=(link,))
    book.note_report(one)
    assert work.link_to("decode-0").num_queued_bytes == 1000
    assert work.num_free_blocks == 10_000


def test_links_of_which_nothing_is_known_have_the_default_bandwidth() -> None:
    one = engine("prefill-0", links=(LinkLoad("decode-1", 7),))
    book, _ = _book(one)
    assert book.work_of(one.descriptor).link_to("decode-1").bytes_per_s == DEFAULT_BYTES_PER_S


def test_bytes_that_are_queued_for_others_delay_those_for_a_consumer() -> None:
    # The interface sends 1 MB/s: to one consumer at a time, or to both with half as much.
    links = (LinkLoad("decode-0", 1_000_000, 1e6, 0.001), LinkLoad("decode-1", 4_000_000, 0.5e6, 0.001))
    one = engine("prefill-0", links=links)
    book, _ = _book(one)
    work = book.work_of(one.descriptor)
    assert work.sent_in_s("decode-0", 500_000) == pytest.approx(5.5), "what the other one gets leaves first"
    assert work.sent_in_s("decode-1", 500_000) == pytest.approx(9.0), "its own link is the narrower way"
    assert work.sent_in_s("decode-2", 500_000) == pytest.approx(5.5)
    _send(book, one, "a", SentWork(10, 0.1, consumer="decode-2", num_handoff_bytes=2_000_000))
    assert work.sent_in_s("decode-0", 500_000) == pytest.approx(7.5), "with what was sent since the report"
    one.reports(links=links[:1])
    book.note_report(one)
    assert work.sent_in_s("decode-0", 500_000) == pytest.approx(1.5)


def test_a_prefill_engine_is_taken_to_spend_its_share_of_all_prompt_work() -> None:
    engines = [engine(name) for name in ("prefill-0", "decode-0", "decode-1")]
    book, clock = _book(*engines)
    second_s = cost_model().seconds_by_feature["token"]
    assert second_s > 0
    for _ in range(40):
        clock.now_s += 0.5
        for one in engines[1:]:
            one.num_prompt_tokens_computed += 512
            one.reports()
            book.note_report(one)
        engines[0].reports()
        book.note_report(engines[0])
    prefill, decode, other = (book.work_of(one.descriptor).prompt_share for one in engines)
    assert decode == pytest.approx(other, rel=0.05)
    assert decode > 0.05
    assert prefill == pytest.approx(decode + other, rel=0.05)


def test_an_engine_that_left_is_forgotten() -> None:
    one, other = engine("both-0", num_decodes=3), engine("both-1")
    book, _ = _book(one, other)
    book.keep([other.descriptor.key])
    assert book.work_of(one.descriptor).num_decodes == 0
    assert book.work_of(one.descriptor).prediction is not None, "its sibling knows its steps"
    assert book.work_of(other.descriptor).block_size == BLOCK_SIZE


def test_whoever_watches_is_told_of_each_change() -> None:
    one = engine("both-0")
    book, _ = _book(one)
    told: list[float] = []

    class Follower:
        def update(self, work: EngineWork) -> None:
            told.append(work.num_decodes)

    follower = Follower()
    book.watch(follower)
    _send(book, one, "a")
    book.note_left(one.descriptor.key, "a")
    one.reports(num_decodes=4)
    book.note_report(one)
    assert told == [1, 0, 4]
    del follower
    gc.collect()
    _send(book, one, "b")
    assert told == [1, 0, 4], "the book does not keep a follower"


def test_a_prompt_that_leaves_a_queue_shortens_it() -> None:
    book, one, other = LoadBook(Clock()), engine("prefill-0").descriptor, engine("decode-0").descriptor
    for number in range(3):
        book.note_sent(one, f"r{number}", SentWork(1000, 2.0, 1000))
    assert [book.starts_in_s(one.key, f"r{number}") for number in range(3)] == [4.0] * 3
    book.note_left(one.key, "r2", is_waiting=True)
    assert book.starts_in_s(one.key, "r1") == 2.0
    book.note_left(one.key, "r1")
    assert book.starts_in_s(one.key, "r0") == 2.0, "r1 may have been computed"
    assert book.starts_in_s(one.key, "unknown") == 0.0
    assert book.starts_in_s(other.key, "r0") == 0.0


def test_who_is_late_is_reported_and_whether_one_that_leaves_was_late_is_not_known() -> None:
    one = engine("decode-0", num_decodes=4, num_decodes_in_time=3, num_coming_decodes=6, num_coming_late=2)
    book = LoadBook(Clock())
    book.note_report(one)
    work = book.work_of(one.descriptor)
    assert (work.num_decodes, work.num_late) == (10, 3)
    book.note_sent(one.descriptor, "new", SentWork(num_context_tokens=100))
    assert (work.num_decodes, work.num_late) == (11, 3)
    book.note_left(one.descriptor.key, "new")
    assert work.num_decodes == 10
    assert work.num_late == pytest.approx(3 * 10 / 11)


def test_work_without_a_request_is_as_if_it_had_not_been_sent_and_then_as_before() -> None:
    book, one, other = LoadBook(Clock()), engine("prefill-0"), engine("decode-0")
    keys = [one.descriptor.key, other.descriptor.key, ("gone", 1)]
    for engine_ in (one, other):
        book.note_report(engine_)
    works = [book.work_of(engine_.descriptor) for engine_ in (one, other)]

    def numbers() -> list[tuple[float, ...]]:
        return [
            (work.num_decodes, work.num_coming_decodes, work.num_context_tokens, work.num_free_blocks, work.wait_s(100))
            for work in works
        ]

    for request_id in ("first", "last"):
        before = numbers()
        one.num_submitted_requests += 1
        other.num_submitted_requests += 1
        book.note_sent(one.descriptor, request_id, SentWork(1000, 2.0))
        book.note_sent(other.descriptor, request_id, SentWork(num_context_tokens=1000))
    after = numbers()
    with book.without(keys, "last"):
        assert numbers() == before
    assert numbers() == after
    works[1].sent.clear()  # Its session was opened again.
    with book.without(keys, "last"):
        assert numbers() == [before[0], after[1]]
    assert numbers() == after


def test_the_load_is_what_all_ingresses_send_to_engines_of_a_kind() -> None:
    one, other = engine("prefill-0"), engine("decode-0")
    book, clock = _book(one, other)
    for number in range(20):
        clock.now_s += 0.05
        _send(book, one, f"r{number}", SentWork(100, 0.01, consumer="decode-0"))
        _send(book, other, f"r{number}", SentWork(num_context_tokens=400, num_output_tokens=10))
        # The report of the engine that the other ingress has sent to may have come before its announcement.
        other.num_submitted_requests += 1
        if number % 2:
            other.reports()
            book.note_report(other)
        whole = SentWork(400, 0.04, 400, num_output_tokens=20)
        book.note_announced(other, other.num_submitted_requests, [whole])
    offered = book.offered([one.descriptor.key, other.descriptor.key])
    assert offered == book.offered([one.descriptor.key]), "both are of one kind"
    assert offered.num_requests == pytest.approx(40 / 0.95, rel=0.02), "since the first one"
    assert offered.num_computed_tokens == pytest.approx(250 * offered.num_requests, rel=0.01)
    assert offered.num_output_tokens == pytest.approx(15 * offered.num_requests, rel=0.01)


def test_what_an_engine_has_done_of_late_is_known_beside_what_its_role_lets_expect() -> None:
    engines = [engine(name) for name in ("prefill-0", "decode-0")]
    book, clock = _book(*engines)
    for _ in range(40):
        clock.now_s += 0.5
        engines[1].num_prompt_tokens_computed += 512
        for one in engines:
            one.reports()
            book.note_report(one)
    prefill, decode = (book.work_of(one.descriptor) for one in engines)
    assert prefill.own_prompt_share == 0
    assert decode.prompt_share == decode.own_prompt_share > 0
    assert prefill.prompt_share == pytest.approx(decode.prompt_share, rel=0.05)
    assert [prefill.share(ignores_roles=ignored) for ignored in (False, True)] == [prefill.prompt_share, 0]


def test_who_was_sent_too_late_is_remembered_until_it_leaves() -> None:
    one = engine("decode-0")
    book = LoadBook(Clock())
    book.note_report(one)
    work = book.work_of(one.descriptor)
    for name, late_part in (("a", 1.0), ("b", 0.25)):
        book.note_sent(one.descriptor, name, SentWork(num_context_tokens=100, late_part=late_part))
    assert (work.num_late, work.num_sent_late) == (1.25, 1.25)
    one.reports(num_decodes=2, num_decodes_in_time=2)
    book.note_report(one)
    assert (work.num_late, work.num_sent_late) == (0.0, 1.25), "none is late yet"
    with book.without([one.descriptor.key], "a"):
        assert work.num_sent_late == 0.25
    assert work.num_sent_late == 1.25
    book.note_left(one.descriptor.key, "a")
    assert work.num_sent_late == 0.25
    book.note_left(one.descriptor.key, "b")
    assert work.num_sent_late == 0.0
