from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.outputs.sent_work import SentWork
from cluster.routing.costs.request_facts import RequestFacts
from cluster.routing.costs.route_cost import decode_cost, prompt_cost
from cluster.routing.decision import RoleChoice, RoleUse
from cluster.routing.fleet import NUM_CANDIDATES, Fleet, Use
from cluster.routing.load_book import LoadBook
from kv_transfer.handoff.control_messages import PROTOCOL_VERSION
from kv_transfer.links.link_compatibility import PairingFacts
from tests.cluster.routing.cost_setup import Clock, FakeEngine, engine

FACTS = PairingFacts(PROTOCOL_VERSION, "tcp", False, "m", "float32", 2, 2, 8, 16, False)
_USUAL = RequestFacts(512, 128)


def _fleet(*engines: FakeEngine) -> tuple[Fleet[FakeEngine], LoadBook]:
    book = LoadBook(Clock())
    for one in engines:
        book.note_report(one)
    fleet = Fleet(engines, book, _USUAL)
    book.watch(fleet)
    return fleet, book


def test_engines_that_cannot_exchange_kv_are_in_groups_of_their_own() -> None:
    other = replace(FACTS, dtype="float16")
    fleet, _ = _fleet(*(engine(f"both-{n}", pairing=facts) for n, facts in enumerate((FACTS, FACTS, other, None))))
    found = [[one.descriptor.engine_id for one in group.engines] for group in fleet.groups]
    assert found == [["both-0", "both-1"], ["both-2"], ["both-3"]]
    consumers = [[fleet.groups.index(one) for one in group.consumers] for group in fleet.groups]
    assert consumers == [[0, 2], [1, 2], [0, 1, 2]], "nothing is known of the facts of the last one"


def test_few_engines_are_all_compared() -> None:
    fleet, _ = _fleet(engine("prefill-0"), engine("decode-0"))
    assert fleet.groups[0].candidates(0.0, 1) == [[0], [1], [0, 1]]


def test_the_cheapest_of_many_is_compared_with_drawn_ones() -> None:
    engines = [engine(f"{role}-{n}", num_decodes=20) for role in ("prefill", "decode") for n in range(50)]
    engines[17], engines[77] = engine("prefill-17"), engine("decode-27")
    fleet, book = _fleet(*engines)
    group = fleet.groups[0]
    drawn = Counter[int]()
    for draw in range(0, 1 << 32, 1 << 25):
        prompt, decode, alone = group.candidates(100.0, draw)
        assert (prompt[0], decode[0], alone[0] in (17, 77)) == (17, 77, True)
        assert len(prompt) <= NUM_CANDIDATES
        assert all(number < 50 for number in prompt)
        assert all(number >= 50 for number in decode)
        drawn.update(prompt[1:])
    assert len(drawn) > 20
    book.note_sent(engines[17].descriptor, "r", SentWork(prefill_s=10.0))
    assert group.candidates(100.0, 1)[Use.PROMPT][0] != 17
    assert group.candidates(120.0, 1)[Use.PROMPT][0] == 17, "its queue is empty by then"


def test_a_fleet_is_sure_once_each_engine_can_be_predicted() -> None:
    unsure = engine("both-1", is_unsure=True)
    fleet, book = _fleet(unsure, engine("both-0"))
    assert not fleet.is_sure
    unsure.reports()
    book.note_report(unsure)
    assert fleet.is_sure


@given(
    loads=st.lists(
        st.tuples(st.sampled_from(["prefill", "decode", "both"]), st.integers(0, 100), st.integers(0, 50_000)),
        min_size=NUM_CANDIDATES + 1,
        max_size=60,
    ),
    draw=st.integers(0, (1 << 64) - 1),
    later_s=st.floats(0.0, 5.0),
)
@settings(max_examples=60, deadline=None)
def test_the_engine_that_the_arrays_find_cheapest_is_the_cheapest_one_by_one(
    loads: list[tuple[str, int, int]], draw: int, later_s: float
) -> None:
    engines = [
        engine(f"{role}-{number}", num_decodes=num_decodes, num_waiting_tokens=num_waiting)
        for number, (role, num_decodes, num_waiting) in enumerate(loads)
    ]
    fleet, book = _fleet(*engines)
    [group], now_s = fleet.groups, book.clock() + later_s

    def cost_s(index: int, use: Use) -> float:
        work = group.works[index]
        assert work.prediction is not None
        prompt, decode = prompt_cost(_USUAL, work, work.prediction, 0), decode_cost(_USUAL, work, work.prediction)
        of_prompt = prompt.seconds + prompt.inflicted_s if use is not Use.DECODE else 0.0
        of_decode = decode.seconds + decode.inflicted_s + decode.blocks_wait_s if use is not Use.PROMPT else 0.0
        return max(work.queue_end_s, now_s) + of_prompt + of_decode

    for use, chosen in zip(Use, group.candidates(now_s, draw), strict=True):
        able = [index for index in range(len(engines)) if group.is_for[use][index]]
        assert bool(chosen) == bool(able)
        if len(able) > NUM_CANDIDATES:
            assert cost_s(chosen[0], use) <= (1 + 1e-6) * min(cost_s(index, use) for index in able)
        assert set(chosen) <= set(able)


def _offer(book: LoadBook, one: FakeEngine, clock: Clock, per_s: float) -> None:
    """Send requests with long answers to an engine for two seconds."""
    for number in range(round(2 * per_s)):
        clock.now_s += 1 / per_s
        book.note_sent(one.descriptor, f"{clock.now_s} {number}", SentWork(512, 0.01, 2048, num_output_tokens=1000))


def _loaded(*names: str) -> tuple[Fleet[FakeEngine], LoadBook, Clock, list[FakeEngine]]:
    clock = Clock()
    book, engines = LoadBook(clock), [engine(name) for name in names]
    for one in engines:
        book.note_report(one)
    return Fleet(engines, book, _USUAL), book, clock, engines


def test_roles_count_as_the_load_of_the_last_seconds_says() -> None:
    fleet, book, clock, engines = _loaded("prefill-0", "decode-0")
    assert fleet.role_choice(0.03, None, clock()) == RoleChoice(), "nothing came yet"
    _offer(book, engines[1], clock, 5.0)
    chosen = fleet.role_choice(0.03, None, clock())
    assert chosen.use is RoleUse.IGNORED, "one engine cannot decode the answers of both"
    _offer(book, engines[1], clock, 100.0)
    clock.now_s -= 2
    assert fleet.role_choice(0.03, None, clock.now_s) == chosen, "looked at twice a second"
    assert fleet.role_choice(0.04, None, clock.now_s) != chosen, "for each aim"
    clock.now_s += 2
    assert fleet.role_choice(0.03, None, clock()).use is RoleUse.WEIGHED, "more than both can do"


def test_roles_are_weighed_without_an_aim_and_where_an_engine_has_none() -> None:
    for names, itl_s in (
        (("prefill-0", "decode-0"), None),
        (("prefill-0", "decode-0", "both-0"), 0.02),
        (("prefill-0", "prefill-1"), 0.02),
        (("decode-0", "decode-1"), 0.02),
    ):
        fleet, book, clock, engines = _loaded(*names)
        _offer(book, engines[1], clock, 8.0)
        assert fleet.role_choice(itl_s, None, clock()) == RoleChoice()


def test_no_client_makes_an_ingress_look_at_any_number_of_aims() -> None:
    fleet, book, clock, engines = _loaded("prefill-0", "decode-0")
    _offer(book, engines[1], clock, 5.0)
    found = [fleet.role_choice(0.03 + number / 1000, None, clock()).use for number in range(100)]
    assert set(found[:16]) == {RoleUse.IGNORED}
    assert set(found[16:]) == {RoleUse.WEIGHED}
