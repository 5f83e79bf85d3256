"""Tests of cluster/routing/cost_router.py and cluster/routing/placements.py."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.requests.adapter import Adapter
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import PoolingParams
from actors.core.requests.slo import Slo
from actors.costs.step_shape import StepShape
from cluster.errors import NoEngineAvailable
from cluster.routing.base import Route
from cluster.routing.decision import Reason, RoleUse, RoutingMode, Way
from cluster.routing.pairing import find_refusal
from kv_transfer.handoff.control_messages import PROTOCOL_VERSION
from kv_transfer.link_load import LinkLoad
from kv_transfer.links.link_compatibility import PairingFacts
from kv_transfer.params import PrefixSource
from tests.cluster.routing.cost_setup import Clock, Cluster, FakeEngine, cost_model, engine, request

FACTS = PairingFacts(PROTOCOL_VERSION, "tcp", False, "m", "float32", 2, 2, 8, 16, False)


def _cluster_with_prompts(bytes_per_s: float = 1e9, queued: int = 0, num_decodes: int = 10) -> Cluster:
    """Make a pair of which the prefill engine spends 60 % of its time on prompts."""
    links = (LinkLoad("decode-0", queued, bytes_per_s, 1e-3),)
    cluster = Cluster(engine("prefill-0", links=links), engine("decode-0", num_decodes=num_decodes))
    cluster.book.work_of(cluster.engines[0].descriptor).prompt_share = 0.6
    return cluster


def _cluster_with_prefix() -> Cluster:
    cluster = Cluster(engine("prefill-0"), engine("decode-0", num_decodes=3))
    cluster.pairs.on_start(request(8192, first_token=7), Route(None, cluster.engines[1]))
    return cluster


@pytest.mark.parametrize(
    ("make", "num_tokens", "expected"),
    [
        pytest.param(_cluster_with_prompts, 1024, ("prefill-0", "decode-0"), id="decodes would suffer: hand over"),
        pytest.param(lambda: _cluster_with_prompts(1e8), 1024, (None, "prefill-0"), id="a link throttled to a tenth"),
        pytest.param(
            lambda: _cluster_with_prompts(queued=10**9), 1024, (None, "prefill-0"), id="a second of bytes on the link"
        ),
        pytest.param(
            lambda: _cluster_with_prompts(num_decodes=0), 1024, (None, "decode-0"), id="nobody decodes: no handoff"
        ),
        pytest.param(
            lambda: Cluster(engine("prefill-0"), engine("decode-0", num_decodes=60)),
            256,
            (None, "prefill-0"),
            id="bound by decode: the prefill engine decodes as well",
        ),
        pytest.param(
            lambda: Cluster(engine("prefill-0", num_waiting_tokens=50_000), engine("decode-0", num_decodes=1)),
            256,
            (None, "decode-0"),
            id="bound by prefill: the decode engine prefills as well",
        ),
        pytest.param(
            lambda: Cluster(engine("both-0", cost_model(2.0)), engine("both-1")),
            256,
            (None, "both-1"),
            id="an engine slowed by half",
        ),
        pytest.param(
            lambda: Cluster(engine("both-0", cost_model(2.0)), engine("both-1", num_decodes=80)),
            256,
            (None, "both-0"),
            id="an engine slowed by half, beside one with much more work",
        ),
        pytest.param(
            lambda: Cluster(engine("both-0", num_free_blocks=0, num_decodes=8), engine("both-1", num_decodes=8)),
            8192,
            (None, "both-1"),
            id="no block is free",
        ),
        pytest.param(
            lambda: Cluster(engine("both-0", max_num_seqs=8, num_decodes=8), engine("both-1", num_decodes=8)),
            256,
            (None, "both-1"),
            id="no request may run beside the others",
        ),
        pytest.param(
            lambda: Cluster(
                engine("both-0", num_waiting_tokens=960, num_coming_decodes=60, num_coming_context_tokens=960),
                engine("both-1", num_decodes=20),
            ),
            64,
            (None, "both-1"),
            id="sixty short prompts of another ingress wait, and will decode for long",
        ),
        pytest.param(
            lambda: Cluster(engine("prefill-0"), engine("prefill-1", num_waiting_tokens=5000)),
            256,
            (None, "prefill-0"),
            id="prefill engines without decode engines",
        ),
        pytest.param(
            lambda: Cluster(engine("decode-0", num_decodes=30), engine("decode-1")),
            256,
            (None, "decode-1"),
            id="decode engines without prefill engines",
        ),
    ],
)
def test_the_cheapest_way_is_taken(
    make: Callable[[], Cluster], num_tokens: int, expected: tuple[str | None, str]
) -> None:
    cluster = make()
    for _ in range(5):
        assert cluster.ids(request(num_tokens)) == expected


def test_a_long_prefix_that_the_decode_engine_has_keeps_the_request_there() -> None:
    cluster = _cluster_with_prefix()
    again = request(8200, first_token=7)
    assert cluster.ids(again) == (None, "decode-0")
    computed_elsewhere = "an unknown prompt is not computed beside those who decode"
    assert cluster.ids(request(8200)) == ("prefill-0", "decode-0"), computed_elsewhere


def test_a_prefix_that_is_quicker_to_fetch_than_to_compute_is_fetched() -> None:
    cluster = _cluster_with_prefix()
    decode = cluster.engines[1]
    fast_link = (LinkLoad("prefill-0", 0, 1e11, 1e-3),)
    decode.reports(num_decodes=60, links=fast_link)
    cluster.all_report()
    route = cluster.choose(request(8200, first_token=7))
    assert route.decode.descriptor.engine_id == "prefill-0"
    assert route.prefix_source == PrefixSource(decode.descriptor.kv_address, 8192)
    assert route.decision is not None
    assert route.decision.chosen is not None
    assert route.decision.chosen.num_cached_tokens == 8192
    assert 0 < route.decision.chosen.fetch_s < 0.1


def test_an_ingress_that_knows_no_load_decides_as_disaggregate() -> None:
    cluster = Cluster()
    cluster.engines = [engine("prefill-0", is_unsure=True), engine("decode-0")]
    route = cluster.choose(request())
    assert (route.prefill, route.decode) == tuple(cluster.engines)
    assert route.decision is not None
    assert (route.decision.reason, route.decision.chosen) == (Reason.MODEL_NOT_SURE, None)
    cluster.all_report()
    cluster.all_report()
    route = cluster.choose(request())
    assert route.decision is not None
    assert route.decision.reason is not Reason.MODEL_NOT_SURE, "the decode engine's model predicts for both"


@pytest.mark.parametrize("model", [None, cost_model(error=0.9)])
def test_models_that_are_not_sure_leave_it_to_disaggregate(model: object) -> None:
    cluster = Cluster(*(engine(name, is_unsure=True) for name in ("prefill-0", "decode-0")))
    for one in cluster.engines:
        one.step_costs = model  # type: ignore[assignment]  # It is a parameter of the test.
    cluster.all_report()
    assert cluster.ids(request()) == ("prefill-0", "decode-0")


@pytest.mark.parametrize(("mode", "expected"), [(RoutingMode.DISAGGREGATE, True), (RoutingMode.COST, False)])
def test_a_pair_is_always_used_in_the_mode_disaggregate(mode: RoutingMode, expected: bool) -> None:
    cluster = Cluster(engine("prefill-0"), engine("decode-0", num_decodes=60), mode=mode)
    route = cluster.choose(request())
    assert (route.prefill is not None) is expected
    assert route.decision is not None
    assert route.decision.mode is mode
    assert (route.decision.reason is Reason.MODE) is expected


def test_what_a_pair_costs_is_recorded_where_the_mode_leaves_no_choice() -> None:
    by_mode = Cluster(engine("prefill-0"), engine("decode-0", num_decodes=60), mode=RoutingMode.DISAGGREGATE)
    by_cost = Cluster(engine("prefill-0"), engine("decode-0", num_decodes=60))
    wanted = request()
    forced, free = by_mode.send(wanted).decision, by_cost.send(wanted).decision
    assert forced is not None
    assert free is not None
    assert forced.chosen is not None
    assert (forced.mode, forced.reason, forced.chosen.way) == (
        RoutingMode.DISAGGREGATE,
        Reason.MODE,
        Way.PREFILL_DECODE,
    )
    assert forced.without_roles_s == free.without_roles_s < forced.chosen.total_s
    assert forced.runner_up == free.chosen, "what the mode cost would have done"
    assert {one.way for one in forced.others} == {Way.DECODE_ALONE, Way.PREFILL_ALONE}
    assert forced.chosen in free.others


def test_one_engine_that_the_mode_aggregate_has_chosen_is_compared_with_pairs() -> None:
    cluster = Cluster(engine("prefill-0"), engine("decode-0", num_decodes=60), mode=RoutingMode.AGGREGATE)
    decision = cluster.send(request()).decision
    assert decision is not None
    assert decision.chosen is not None
    assert decision.chosen.prefill_engine_id is None
    assert Way.PREFILL_DECODE in {one.way for one in decision.others}


def test_as_long_as_an_engine_is_unknown_the_cost_of_the_others_is_recorded_without_a_comparison() -> None:
    other = replace(FACTS, dtype="float16")
    cluster = Cluster(
        engine("prefill-0", pairing=FACTS),
        engine("decode-0", pairing=FACTS),
        engine("both-0", pairing=other, is_unsure=True),
    )
    decision = cluster.send(request()).decision
    assert decision is not None
    assert decision.reason is Reason.MODEL_NOT_SURE
    assert decision.chosen is not None
    assert (decision.chosen.way, decision.without_roles_s, decision.others) == (Way.PREFILL_DECODE, 0.0, ())


def test_448_sequential_unrelated_prompts_spread_over_two_idle_engines() -> None:
    cluster = Cluster(engine("both-0"), engine("both-1"))
    num_requests = Counter[str]()
    for _ in range(448):
        wanted = request()
        route = cluster.send(wanted)
        num_requests[route.decode.descriptor.engine_id] += 1
        cluster.end(wanted, route)
        cluster.clock.now_s += 1
    assert 0.4 < num_requests["both-0"] / 448 < 0.6


def test_sequential_unrelated_prompts_spread_over_a_hundred_idle_engines() -> None:
    cluster = Cluster(*(engine(f"both-{number}") for number in range(100)))
    num_requests = Counter[str]()
    for _ in range(2000):
        wanted = request()
        route = cluster.send(wanted)
        num_requests[route.decode.descriptor.engine_id] += 1
        cluster.end(wanted, route)
        cluster.clock.now_s += 1
    assert len(num_requests) > 95
    assert max(num_requests.values()) < 60


def test_a_request_gets_the_same_answer_again_as_long_as_nothing_has_changed() -> None:
    cluster = Cluster(*(engine(f"{role}-{number}") for role in ("prefill", "decode", "both") for number in range(5)))
    for _ in range(20):
        wanted = request()
        assert len({cluster.ids(wanted) for _ in range(5)}) == 1


def test_reports_that_are_5_s_late_do_not_send_all_requests_to_one_engine() -> None:
    busy = engine("both-0", num_decodes=8)
    cluster = Cluster(busy, *(engine(f"both-{number}") for number in range(1, 5)))
    numbers = Counter[str]()
    for _ in range(92):
        numbers[cluster.send(request()).decode.descriptor.engine_id] += 1
        cluster.clock.now_s += 5 / 92
    assert min(numbers.values()) >= 10
    assert numbers["both-0"] < min(numbers[f"both-{number}"] for number in range(1, 5)), "it had 8 before"
    assert max(numbers.values()) <= 24


def test_the_least_work_wins_where_costs_are_the_same_within_the_error() -> None:
    cluster = Cluster(engine("both-0", num_waiting_tokens=16), engine("both-1"))
    cluster.book.work_of(cluster.engines[0].descriptor).queue_end_s = cluster.clock() + 1e-4
    for _ in range(20):
        route = cluster.choose(request())
        assert route.decode is cluster.engines[1]
        assert route.decision is not None
        assert route.decision.reason is Reason.TIE_DRAWN


def test_a_decision_has_the_terms_of_each_way() -> None:
    cluster = _cluster_with_prompts()
    wanted = replace(request(1024), slo=Slo(ttft_s=1.0, itl_s=0.05))
    decision = cluster.choose(wanted).decision
    assert decision is not None
    assert decision.chosen is not None
    assert (decision.request_id, decision.mode, decision.reason) == (wanted.request_id, RoutingMode.COST, Reason.COST)
    assert decision.chosen.way is Way.PREFILL_DECODE
    assert {one.way for one in decision.others} == {Way.DECODE_ALONE, Way.PREFILL_ALONE}
    for one in (decision.chosen, *decision.others):
        parts_s = one.prefill_wait_s + one.decode_wait_s + one.prefill_s + one.decode_s + one.inflicted_s
        parts_s += one.transfer_s + one.blocks_wait_s + one.fetch_s + one.adapter_s + one.miss_penalty_s
        assert one.total_s == pytest.approx(parts_s)
    assert decision.runner_up == decision.others[0]
    assert decision.without_roles_s == min(one.total_s for one in decision.others)


def test_an_only_engine_is_the_only_way() -> None:
    decision = Cluster(engine("both-0")).choose(request()).decision
    assert decision is not None
    assert (decision.reason, decision.others, decision.runner_up) == (Reason.ONLY_WAY, (), None)


def test_a_tight_aim_keeps_a_request_from_a_queue() -> None:
    # Waiting costs 1 s there, and 40 others would wait for the prompt here.
    cluster = Cluster(engine("both-0", num_waiting_tokens=9000), engine("both-1", num_decodes=40))
    assert cluster.ids(request(512)) == (None, "both-0")
    assert cluster.ids(replace(request(512), slo=Slo(ttft_s=0.3))) == (None, "both-1")


def test_the_aims_of_the_router_count_for_requests_without_aims() -> None:
    cluster = Cluster(engine("both-0", num_waiting_tokens=9000), engine("both-1", num_decodes=40))
    cluster.router._aims = (0.3, None)
    assert cluster.ids(request(512)) == (None, "both-1")
    assert cluster.ids(replace(request(512), slo=Slo(ttft_s=30.0))) == (None, "both-0")


def test_an_adapter_draws_requests_to_the_engines_that_have_it() -> None:
    cluster = Cluster(engine("both-0"), engine("both-1"))
    sql = Adapter("sql", "/adapters/sql", "1")
    first = replace(request(), lora=sql)
    route = cluster.send(first)
    cluster.end(first, route)
    cluster.clock.now_s += 1
    for _ in range(10):
        wanted = replace(request(), lora=sql)
        assert cluster.choose(wanted).decode is route.decode
    decision = cluster.choose(replace(request(), lora=sql)).decision
    assert decision is not None
    assert decision.runner_up is not None
    assert decision.runner_up.adapter_s > 0


def test_a_prompt_whose_vector_is_wanted_is_routed_as_before() -> None:
    cluster = Cluster(engine("prefill-0"), engine("prefill-1"))
    cluster.engines[0].num_unfinished_requests = 5
    wanted = replace(request(), pooling_params=PoolingParams())
    route = cluster.send(wanted)
    assert route.decode is cluster.engines[1]
    assert route.decision is not None
    assert route.decision.reason is Reason.OWN_RULE
    assert cluster.book.work_of(route.decode.descriptor).num_decodes == 0


def test_an_engine_of_role_encode_serves_no_requests() -> None:
    with pytest.raises(NoEngineAvailable):
        Cluster(engine("encode-0")).choose(request())


def test_a_role_that_was_switched_counts_from_the_next_snapshot() -> None:
    cluster = Cluster(engine("prefill-0"), engine("decode-0", num_decodes=10))
    for one in cluster.engines:
        cluster.book.work_of(one.descriptor).prompt_share = 0.6 if one is cluster.engines[0] else 0.0
    assert cluster.ids(request(1024)) == ("prefill-0", "decode-0")
    descriptor = cluster.engines[1].descriptor
    cluster.engines = [cluster.engines[0], cluster.engines[1]]
    cluster.engines[1].descriptor = replace(descriptor, role=cluster.engines[0].descriptor.role)
    assert cluster.choose(request(1024)).prefill is None


_ENGINES = st.lists(
    st.tuples(
        st.sampled_from(["prefill", "decode", "both"]),
        st.integers(0, 100),
        st.integers(0, 20_000),
        st.sampled_from([0.7, 1.0, 2.0]),
        st.sampled_from([FACTS, replace(FACTS, dtype="float16")]),
        st.floats(1e6, 1e10),
    ),
    min_size=1,
    max_size=6,
)


@given(_ENGINES, st.integers(1, 5000), st.integers(1, 500), st.sampled_from([None, 0.2, 2.0]))
def test_no_compared_placement_is_cheaper_ranks_rise_and_refused_engines_are_never_paired(
    drawn: list[tuple[str, int, int, float, PairingFacts, float]], num_tokens: int, max_tokens: int, aim_s: float | None
) -> None:
    engines: list[FakeEngine] = []
    for number, (role, num_decodes, num_waiting, slowness, facts, bandwidth) in enumerate(drawn):
        links = tuple(LinkLoad(f"{other}-{n}", 0, bandwidth, 0.0) for n, (other, *_) in enumerate(drawn))
        engines.append(
            engine(
                f"{role}-{number}",
                cost_model(slowness),
                pairing=facts,
                num_decodes=num_decodes,
                num_waiting_tokens=num_waiting,
                links=links,
            )
        )
    cluster = Cluster(*engines)
    for _ in range(3):
        wanted = replace(request(num_tokens, max_tokens), slo=Slo(ttft_s=aim_s, itl_s=aim_s))
        route = cluster.send(wanted)
        assert route.decision is not None
        chosen = route.decision.chosen
        assert chosen is not None
        known = [one for one in (chosen, *route.decision.others, route.decision.runner_up) if one is not None]
        cheapest = min(known, key=lambda one: one.total_s)
        if cheapest.total_s < chosen.total_s:
            assert route.decision.reason is Reason.TIE_DRAWN
            margin_s = 0.1 * (cheapest.prefill_wait_s + cheapest.prefill_s)
            assert chosen.total_s <= cheapest.total_s + margin_s + 1e-9
        if route.prefill is not None:
            assert route.prefill.descriptor.handoff_rank < route.decode.descriptor.handoff_rank
            assert find_refusal(route.prefill.descriptor, route.decode.descriptor) is None
            assert chosen.prefill_engine_id == route.prefill.descriptor.engine_id
        assert chosen.decode_engine_id == route.decode.descriptor.engine_id


def _mean_wait_s(num_ingresses: int, num_requests: int = 1200) -> float:
    """Return how long prompts wait on four engines of which 70 % of the time is used, with reports twice a second."""
    clock = Clock()
    engines = [engine(f"both-{number}") for number in range(4)]
    clusters = [Cluster(*engines, clock=clock) for _ in range(num_ingresses)]
    draw = random.Random(5)
    ends_s = dict.fromkeys(range(4), clock())
    waits_s, report_s = 0.0, clock()
    prefill_s = cost_model().seconds(StepShape(512, num_prefills=1, num_prefill_pairs=512 * 256))
    for _ in range(num_requests):
        clock.now_s += draw.expovariate(0.7 * 4 / prefill_s)
        if clock() >= report_s:
            report_s = clock() + 0.5
            for number, one in enumerate(engines):
                one.reports(num_waiting_tokens=round(512 * max(ends_s[number] - clock(), 0.0) / prefill_s))
            for cluster in clusters:
                cluster.all_report()
        cluster = draw.choice(clusters)
        wanted = request(512, max_tokens=1)
        number = engines.index(cluster.send(wanted).decode)
        cluster.router.on_leave(wanted.request_id)
        ends_s[number] = max(ends_s[number], clock()) + prefill_s
        waits_s += ends_s[number] - prefill_s - clock()
    return waits_s / num_requests / prefill_s


def test_several_ingresses_spread_prompts_nearly_as_well_as_one() -> None:
    # In units of one prompt's prefill. Engines that are drawn at random have queues of 0.7 / (2 * 0.3) = 1.17.
    assert _mean_wait_s(1) < 0.3
    assert _mean_wait_s(3) < 0.8


AIMS = Slo(ttft_s=1.0, itl_s=0.025)


def queue_at(cluster: Cluster, engine_id: str, num_prompts: int = 10) -> list[EngineCoreRequest]:
    """Submit prompts of 0.4 s each to an engine, while it is the only one; return them."""
    engines = cluster.engines
    cluster.engines = [one for one in engines if one.descriptor.engine_id == engine_id]
    waiting = [request(4000, max_tokens=20) for _ in range(num_prompts)]
    waiting = [replace(one, slo=AIMS, arrival_time_s=cluster.clock.now_s) for one in waiting]
    for one in waiting:
        cluster.send(one)
    cluster.engines = engines
    return waiting


def again(waiting: EngineCoreRequest) -> EngineCoreRequest:
    return replace(waiting, request_id=f"{waiting.request_id}+1", attempt=1)


def reroute(cluster: Cluster, waiting: EngineCoreRequest) -> Route[FakeEngine] | None:
    return cluster.router.reroute(waiting.request_id, again(waiting), cluster.engines)


def test_a_prompt_that_waits_goes_to_an_engine_without_prompts() -> None:
    cluster = Cluster(engine("prefill-0"), engine("decode-0"))
    p0, d0 = (cluster.book.work_of(one.descriptor) for one in cluster.engines)
    waiting = queue_at(cluster, "prefill-0")
    queued_s = p0.wait_s(cluster.clock())
    cluster.clock.now_s += 0.5
    route = reroute(cluster, waiting[-1])

    assert route is not None
    assert (route.prefill, route.decode) == (None, cluster.engines[1])
    assert route.prefix_source is None, "its prompt was not computed where it waited"
    assert route.decision is not None
    assert (route.decision.reason, route.decision.request_id) == (Reason.REROUTED, again(waiting[-1]).request_id)
    assert route.decision.chosen is not None
    assert route.decision.chosen.num_cached_tokens == 0
    assert route.decision.chosen.way is Way.DECODE_ALONE
    assert {one.way for one in route.decision.others} == {Way.PREFILL_ALONE, Way.PREFILL_DECODE}
    assert (p0.num_decodes, len(p0.sent)) == (9, 9), "it has left"
    assert p0.wait_s(cluster.clock()) == pytest.approx(0.9 * queued_s - 0.5, rel=0.01)
    cluster.router.on_start(again(waiting[-1]), route)
    assert list(d0.sent) == [again(waiting[-1]).request_id]
    assert d0.wait_s(cluster.clock()) == pytest.approx(queued_s / 10, rel=0.01)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda cluster: queue_at(cluster, "decode-0", 9), id="others wait there, too"),
        pytest.param(lambda cluster: cluster.engines.pop(0), id="its engine serves no more"),
        pytest.param(lambda cluster: cluster.engines.pop(1), id="there is no other engine"),
        pytest.param(
            lambda cluster: cluster.engines.append(
                engine("both-0", pairing=replace(FACTS, dtype="bfloat16"), is_unsure=True)
            ),
            id="an engine cannot predict its steps",
        ),
        pytest.param(
            lambda cluster: (
                cluster.engines[1].reports(num_decodes=100, num_decodes_in_time=100, decode_gap_s=0.02),
                cluster.book.note_report(cluster.engines[1]),
            ),
            id="a hundred requests in time would miss their aim",
        ),
    ],
)
def test_a_prompt_stays_in_its_queue(change: Callable[[Cluster], object]) -> None:
    cluster = Cluster(engine("prefill-0"), engine("decode-0"))
    waiting = queue_at(cluster, "prefill-0")
    change(cluster)
    assert reroute(cluster, waiting[-1]) is None
    assert len(cluster.book.work_of(engine("prefill-0").descriptor).sent) == 10


def test_a_prompt_that_is_next_stays_in_its_queue() -> None:
    cluster = Cluster(engine("prefill-0"), engine("decode-0"))
    assert reroute(cluster, queue_at(cluster, "prefill-0", 1)[0]) is None


def test_who_was_not_routed_by_cost_stays() -> None:
    cluster = Cluster(engine("prefill-0"), engine("decode-0"), mode=RoutingMode.DISAGGREGATE)
    waiting = [request(4000) for _ in range(10)]
    for one in waiting:
        cluster.send(one)
    assert reroute(cluster, waiting[-1]) is None
    assert reroute(cluster, request(4000)) is None


def test_a_prefix_that_another_engine_has_counts_where_it_goes() -> None:
    cluster = Cluster(engine("prefill-0"), engine("decode-0"), engine("decode-1"))
    waiting = queue_at(cluster, "prefill-0")
    known = replace(waiting[-1], request_id="the same prompt before")
    cluster.pairs.on_start(known, Route(None, cluster.engines[2]))
    route = reroute(cluster, waiting[-1])
    assert route is not None
    assert route.decode is cluster.engines[2]
    assert route.decision is not None
    assert route.decision.chosen is not None
    assert route.decision.chosen.num_cached_tokens > 3900


def test_what_the_client_has_waited_counts_for_the_aim() -> None:
    cluster = Cluster(engine("prefill-0"), engine("decode-0"))
    waiting = queue_at(cluster, "prefill-0")
    cluster.clock.now_s += 0.9
    route = reroute(cluster, waiting[-1])
    assert route is not None
    assert route.decision is not None
    chosen = route.decision.chosen
    assert chosen is not None
    assert chosen.ttft_s < 1.0
    assert chosen.ttft_miss_probability > 0.99


def _send_for_some_time(cluster: Cluster, per_s: int, num_tokens: int, itl_s: float, max_tokens: int = 16) -> None:
    """Send requests for two seconds that end at once, each with an aim."""
    for _ in range(2 * per_s):
        cluster.clock.now_s += 1 / per_s
        wanted = replace(request(num_tokens, max_tokens), slo=Slo(ttft_s=1.0, itl_s=itl_s))
        cluster.end(wanted, cluster.send(wanted), max_tokens)
        cluster.all_report()


def test_where_only_roles_meet_the_aims_a_request_keeps_to_them_though_another_placement_costs_less() -> None:
    cluster = Cluster(engine("prefill-0"), engine("decode-0"))
    aims = Slo(ttft_s=1.0, itl_s=0.008)
    wanted = [replace(request(512, 64), slo=aims) for _ in range(3)]
    assert cluster.ids(wanted[0])[0] is None, "nothing else is there: a handoff would only take time"
    _send_for_some_time(cluster, 12, 512, 0.008, 64)
    route = cluster.choose(wanted[1])
    assert (route.prefill, route.decode) == tuple(cluster.engines)
    assert route.reasons is not None
    decision = route.reasons.describe()
    assert decision.roles is not None
    assert decision.roles.use is RoleUse.KEPT
    assert decision.roles.ignored_per_s < decision.roles.offered_per_s < decision.roles.kept_per_s
    assert decision.chosen is not None
    assert min(one.total_s for one in decision.others) < decision.chosen.total_s

    cluster.engines[0].reports(num_waiting_tokens=40_000)
    cluster.all_report()
    assert cluster.ids(wanted[2]) == (None, "decode-0"), "its first token would be late"


@pytest.mark.parametrize("per_s", [0, 12], ids=["weighed", "kept"])
def test_a_prompt_that_waits_stays_at_its_role_while_roles_are_kept(per_s: int) -> None:
    cluster = Cluster(engine("prefill-0"), engine("decode-0"))
    _send_for_some_time(cluster, per_s, 512, 0.008, 64)
    cluster.clock.now_s += 0.4
    prefill, decode = cluster.engines
    cluster.engines = [prefill]
    now_s = cluster.clock()
    waiting = [replace(request(2000, 64), slo=Slo(ttft_s=1.0, itl_s=0.008), arrival_time_s=now_s) for _ in range(4)]
    for one in waiting:
        cluster.send(one)
    cluster.engines = [prefill, decode]
    found = reroute(cluster, waiting[-1])
    if per_s:
        assert found is None, "its first token comes in time where it is"
    else:
        assert found is not None
        assert (found.prefill, found.decode) == (None, decode)


def test_where_roles_do_not_meet_the_aims_each_engine_gets_its_part_of_everything() -> None:
    cluster = Cluster(engine("prefill-0"), engine("decode-0"))
    _send_for_some_time(cluster, 30, 64, 0.02, 200)
    served = Counter[str]()
    for number in range(20):
        wanted = replace(request(64, 200), slo=Slo(ttft_s=1.0, itl_s=0.02))
        route = cluster.send(wanted)
        assert route.reasons is not None
        roles = route.reasons.describe().roles
        assert roles is not None
        assert roles.use is RoleUse.IGNORED, (number, roles)
        assert route.prefill is None
        served[route.decode.descriptor.engine_id] += 1
        cluster.clock.now_s += 1 / 30
    assert min(served.values()) >= 8, served


def _burst(cluster: Cluster, num_prompts: int) -> tuple[list[RoleUse], Counter[str]]:
    """Submit prompts of 0.4 s at once; return how much roles counted, and how many prompts each engine computes."""
    uses, computing = [], Counter[str]()
    for _ in range(num_prompts):
        route = cluster.send(replace(request(4000, max_tokens=20), slo=AIMS, arrival_time_s=cluster.clock.now_s))
        roles = route.reasons.describe().roles if route.reasons is not None else None
        assert roles is not None
        uses.append(roles.use)
        computing[(route.prefill or route.decode).descriptor.engine_id] += 1
    return uses, computing


def test_in_an_overload_both_engines_share_all_prompts() -> None:
    """Nearly all of them are late, whatever is done. Who is in time is not worth an idle engine."""
    cluster = Cluster(engine("prefill-0"), engine("decode-0"))
    uses, computing = _burst(cluster, 32)
    assert uses[0] is RoleUse.WEIGHED, "the first one finds nobody"
    first = uses.index(RoleUse.OVERLOADED)
    assert set(uses[first:]) == {RoleUse.OVERLOADED}
    assert min(computing.values()) >= 14, computing


def test_in_an_overload_the_delay_of_others_is_no_reason_to_wait_for_another_engine() -> None:
    """Else the one engine would get all prompts, the other would end long before it, and the last answers be later."""
    cluster = Cluster(engine("prefill-0"), engine("decode-0"))
    cluster.engines[1].reports(num_decodes=20)
    cluster.all_report()
    queue_at(cluster, "prefill-0", 6)
    route = cluster.choose(replace(request(4000, max_tokens=20), slo=AIMS))
    assert (route.prefill, route.decode) == (None, cluster.engines[1])
    assert route.decision is not None
    assert route.decision.roles is not None
    assert route.decision.roles.use is RoleUse.OVERLOADED
    terms = [route.decision.chosen, *route.decision.others]
    assert all(one is not None and one.inflicted_s == 0.0 for one in terms)


def test_as_long_as_more_decode_in_time_than_wait_in_vain_they_are_protected() -> None:
    cluster = Cluster(engine("prefill-0"), engine("decode-0"))
    cluster.engines[1].reports(num_decodes=40, num_decodes_in_time=40, decode_gap_s=0.02)
    cluster.book.note_report(cluster.engines[1])
    uses, computing = _burst(cluster, 6)
    assert RoleUse.OVERLOADED not in uses
    assert computing == {"prefill-0": 6}


def test_those_whose_gaps_a_queue_of_prompts_makes_too_long_are_not_protected() -> None:
    cluster = Cluster(engine("prefill-0"), engine("decode-0"))
    cluster.engines[1].reports(num_decodes=40, num_decodes_in_time=40, decode_gap_s=0.02)
    cluster.book.note_report(cluster.engines[1])
    queue_at(cluster, "decode-0", 2)
    uses, _ = _burst(cluster, 6)
    assert uses[-1] is RoleUse.OVERLOADED


@pytest.mark.parametrize("aims", [Slo(itl_s=0.025), Slo(ttft_s=1.0)])
def test_requests_without_one_of_the_aims_find_no_overload(aims: Slo) -> None:
    cluster = Cluster(engine("prefill-0"), engine("decode-0"))
    queue_at(cluster, "prefill-0", 30)
    route = cluster.choose(replace(request(4000, max_tokens=20), slo=aims))
    assert route.decision is not None
    assert route.decision.roles is not None
    assert route.decision.roles.use is not RoleUse.OVERLOADED


def test_the_record_of_an_overload_has_no_penalty_and_says_who_will_be_late() -> None:
    cluster = Cluster(engine("prefill-0"), engine("decode-0"))
    _burst(cluster, 31)
    route = cluster.choose(replace(request(4000, max_tokens=20), slo=AIMS))
    assert route.decision is not None
    assert route.decision.chosen is not None
    assert route.decision.chosen.miss_penalty_s == 0.0
    assert route.decision.chosen.ttft_miss_probability > 0.99
