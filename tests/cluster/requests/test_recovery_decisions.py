"""A table of what becomes of a request whose attempts fail; the clock is a number, and no engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from actors.core.outputs.engine_core_outputs import Preemption
from actors.core.requests.multimodal import EncoderInput
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from cluster.errors import DeadlineExceeded, EngineFailed, NoEngineAvailable, OutputsDiverged
from cluster.requests.moves.migration import PreemptedRequest
from cluster.requests.recovery_decisions import (
    Decision,
    FailedAttempt,
    GiveUp,
    RecoveryDecisions,
    RecoveryPolicy,
    TryAgain,
)
from cluster.routing.base import EngineT, Route
from cluster.routing.engine_connection import EngineKey, EngineRole
from kv_transfer.params import PrefixSource
from tests.cluster.serving_setup import RecordingRouter
from tests.fakes import FakeEngine

REQUEST = EngineCoreRequest(
    request_id="r",
    prompt_token_ids=[1, 2, 3],
    sampling_params=SamplingParams(seed=7),
    output_token_ids=[9],
)
POLICY = RecoveryPolicy(max_attempts=3, engine_timeout_s=10.0)
NOW_S = 100.0
D0, D1 = ("d0", 1), ("d1", 1)


def failed(
    *token_ids: int,
    lost: Sequence[EngineKey] = (),
    can_resume: bool = True,
    has_decoded: bool = False,
    was_out_of_blocks: bool = False,
) -> FailedAttempt:
    error = EngineFailed("r", "it broke", num_new_tokens=0, can_resume=can_resume)
    return FailedAttempt(error, [9, *token_ids], frozenset(lost), has_decoded, was_out_of_blocks)


def decide(*failures: FailedAttempt, deadline_s: float | None = None) -> list[Decision]:
    decisions = RecoveryDecisions(REQUEST, POLICY, deadline_s)
    return [decisions.after_failure(failure, NOW_S) for failure in failures]


AGAIN = "again"


@pytest.mark.parametrize(
    ("failures", "outcomes"),
    [
        pytest.param([failed()], [AGAIN], id="an engine's fault"),
        pytest.param([failed(can_resume=False)], ["it broke"], id="the request's own fault"),
        pytest.param([failed(), failed(), failed()], [AGAIN, AGAIN, "it broke"], id="as many attempts as are allowed"),
        pytest.param(
            [failed(lost=[D0]), failed(lost=[D1])],
            [AGAIN, "it broke; 2 engines died with the request"],
            id="it may be what kills engines",
        ),
        pytest.param([failed(lost=[D0, D1])], ["it broke; 2 engines died with the request"], id="both of a pair died"),
        pytest.param([failed(lost=[D0]), failed(lost=[D0])], [AGAIN, AGAIN], id="one incarnation was cut off twice"),
        pytest.param(
            [failed(lost=[D0]), failed(5, lost=[D1], has_decoded=True), failed(lost=[("d2", 1)])],
            [AGAIN, AGAIN, "it broke; 2 engines died with the request"],
            id="an engine that decoded clears it of the death before",
        ),
        pytest.param(
            [failed(number, was_out_of_blocks=True) for number in range(6)], [AGAIN] * 6, id="blocks were short"
        ),
        pytest.param(
            [failed(), failed(4, was_out_of_blocks=True), failed(), failed()],
            [AGAIN, AGAIN, AGAIN, "it broke"],
            id="what was short of blocks is no failure",
        ),
    ],
)
def test_a_request_goes_on_or_is_given_up(failures: Sequence[FailedAttempt], outcomes: list[str]) -> None:
    assert [outcome_of(decision) for decision in decide(*failures)] == outcomes


def outcome_of(decision: Decision) -> str:
    return AGAIN if isinstance(decision, TryAgain) else str(decision.error).removeprefix("r: ")


def test_it_goes_on_at_the_next_position_under_another_id() -> None:
    decisions = RecoveryDecisions(REQUEST, POLICY)
    assert decisions.after_failure(failed(5, 6), NOW_S) == TryAgain(limit_s=110.0)
    assert decisions.request == replace(REQUEST, request_id="r+1", attempt=1, output_token_ids=[9, 5, 6])
    assert decisions.after_failure(failed(5, 6, 7), NOW_S) == TryAgain(limit_s=110.0)
    assert decisions.request == replace(REQUEST, request_id="r+2", attempt=2, output_token_ids=[9, 5, 6, 7])


@pytest.mark.parametrize("can_resume", [False, True])
def test_the_error_counts_from_what_the_client_came_with(can_resume: bool) -> None:
    again, over = decide(failed(5), failed(5, 6, lost=[D0, D1], can_resume=can_resume))
    assert isinstance(again, TryAgain)
    assert isinstance(over, GiveUp)
    assert isinstance(over.error, EngineFailed)
    assert (over.error.num_new_tokens, over.error.can_resume) == (2, False)


def test_the_last_error_is_told_as_it_is() -> None:
    error = OutputsDiverged("r+2", "position 3 was token 1 and then token 2", num_new_tokens=0, can_resume=True)
    *_, last = decide(failed(), failed(), replace(failed(5), error=error))
    assert isinstance(last, GiveUp)
    assert (type(last.error), str(last.error)) == (OutputsDiverged, str(error))
    assert isinstance(last.error, OutputsDiverged)
    assert (last.error.num_new_tokens, error.num_new_tokens) == (1, 0), "the attempt's own error stays what it was"


@pytest.mark.parametrize(
    ("deadline_s", "limit_s", "error"),
    [
        pytest.param(None, 110.0, EngineFailed, id="no deadline"),
        pytest.param(105.0, 105.0, DeadlineExceeded, id="the client's time ends first"),
        pytest.param(120.0, 110.0, EngineFailed, id="the wait ends first"),
    ],
)
def test_a_request_waits_for_engines_as_long_as_it_may(
    deadline_s: float | None, limit_s: float, error: type[Exception]
) -> None:
    decisions = RecoveryDecisions(REQUEST, POLICY, deadline_s)
    failure = failed(5)
    waited = decisions.after_failure(failure, NOW_S)
    assert isinstance(waited, TryAgain)
    assert waited.limit_s == limit_s
    end = decisions.after_wait(failure, waited, NoEngineAvailable()).error
    assert type(end) is error
    if isinstance(end, EngineFailed):
        assert (end.reason, end.num_new_tokens, end.can_resume) == (
            "it broke; then no engine serves; retry when one is ready",
            1,
            True,
        )


def test_a_migration_is_no_attempt_and_fetches_what_is_cached_where_it_was() -> None:
    decisions, preemption = RecoveryDecisions(REQUEST, POLICY), Preemption(num_computed_tokens=4, num_wait_steps=30)
    here = FakeEngine("d0", EngineRole.DECODE).descriptor
    assert decisions.preempted(2, preemption) == PreemptedRequest(num_tokens=5, num_wait_steps=30, num_migrations=0)
    request = decisions.migrate([9, 5], here, preemption)
    source = PrefixSource(here.kv_address, 4)
    assert request == replace(
        REQUEST, request_id="r+1", attempt=1, output_token_ids=[9, 5], prefix_source=source, encoder_inputs=()
    )
    assert decisions.preempted(2, preemption).num_migrations == 1
    assert outcome_of(decisions.after_failure(failed(5), NOW_S)) == AGAIN
    assert (decisions.request.request_id, decisions.request.prefix_source) == ("r+2", None)
    assert [outcome_of(decisions.after_failure(failed(5), NOW_S)) for _ in range(2)] == [AGAIN, "it broke"]


def test_the_router_chooses_among_the_engines_that_serve() -> None:
    prefill, decode = FakeEngine("p0", EngineRole.PREFILL), FakeEngine("d0", EngineRole.DECODE)
    decisions = RecoveryDecisions(REQUEST, POLICY)
    route = decisions.choose_route(RecordingRouter(), [prefill, decode])
    assert (route.prefill, route.decode) == (prefill, decode)
    with pytest.raises(NoEngineAvailable):
        decisions.choose_route(RecordingRouter(), [])


class OtherRoutes(RecordingRouter):
    """Sends every request that waits to the same engine."""

    def __init__(self, target: FakeEngine) -> None:
        super().__init__()
        self.target = target
        self.asked: list[tuple[str, str]] = []

    def reroute(self, waiting_id: str, again: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT] | None:
        self.asked.append((waiting_id, again.request_id))
        return next((Route(None, one) for one in engines if one.descriptor is self.target.descriptor), None)


def test_a_request_that_waits_goes_elsewhere_under_another_id_and_only_once() -> None:
    target, decisions = FakeEngine("d1", EngineRole.DECODE), RecoveryDecisions(REQUEST, POLICY)
    router = OtherRoutes(target)
    assert decisions.reroute(router, [9], []) is None
    assert decisions.request is REQUEST, "it stays where it is, as it is"
    route = decisions.reroute(router, [9], [target])
    assert route is not None
    assert route.decode is target
    assert decisions.request == replace(REQUEST, request_id="r+1", attempt=1)
    assert decisions.reroute(router, [9], [target]) is None
    assert router.asked == [("r", "r+1"), ("r", "r+1")]


def test_who_has_gone_elsewhere_has_not_failed() -> None:
    target, decisions = FakeEngine("d1", EngineRole.DECODE), RecoveryDecisions(REQUEST, POLICY)
    assert decisions.reroute(OtherRoutes(target), [9], [target]) is not None
    assert isinstance(decisions.after_failure(failed(), NOW_S), TryAgain)
    assert isinstance(decisions.after_failure(failed(), NOW_S), TryAgain)
    assert isinstance(decisions.after_failure(failed(), NOW_S), GiveUp)


def test_a_request_with_images_stays_with_the_engine_that_gets_their_embeddings() -> None:
    target = FakeEngine("d1", EngineRole.DECODE)
    decisions = RecoveryDecisions(replace(REQUEST, encoder_inputs=(EncoderInput("image", {}),)), POLICY)
    assert decisions.reroute(OtherRoutes(target), [9], [target]) is None
