"""A request whose prefix is on its way here for another one waits for it, for a bounded time, and others pass it."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from actors.core.loads.arriving_prefixes import MAX_WAITING, ArrivingPrefixes
from actors.core.requests.request import Request, RequestStatus
from kv_transfer.connector.reports import LoadOutcome, ReceivedKV
from kv_transfer.params import TransferRole
from kv_transfer.prefix.prefix_fetch import PrefixFetches
from kv_transfer.prefix.prefix_sources import PrefixSources
from tests.actors.core.builders import BLOCK_SIZE, Clock, make_request, make_scheduler
from tests.actors.core.fakes import Driver, FakeConnector, reference_tokens
from tests.actors.core.known_speed import KnownSpeed
from tests.kv_transfer.reported import output_of

TOKEN_S = 0.25
"""The seconds in which the engine is taken to compute a token of a prompt."""
PREFIX = range(1, 13)
OTHERS = range(500, 520)


class Engine:
    """A decode engine, to which a handoff of a request `c` with PREFIX is under way."""

    def __init__(self, *, token_s: float | None = TOKEN_S, max_num_batched_tokens: int = 32) -> None:
        self.clock, self.connector = Clock(), FakeConnector()
        scheduler = make_scheduler(
            connector=self.connector,
            prefix_sources=KnownSpeed(token_s),
            max_num_batched_tokens=max_num_batched_tokens,
            handoff_timeout_s=1000.0,
            clock=self.clock,
        )
        self.driver = Driver(scheduler)
        self.add("c", [*PREFIX, 100], TransferRole.CONSUMER)
        self.driver.step()
        assert scheduler.requests["c"].status is RequestStatus.WAITING_FOR_REMOTE_KVS

    def add(
        self, request_id: str, prompt: Sequence[int], role: TransferRole | None = None, max_tokens: int = 3
    ) -> Request:
        request = make_request(request_id, prompt, max_tokens=max_tokens, ignore_eos=True, role=role)
        self.driver.scheduler.add_request(request)
        return request

    def arrive(self, num_tokens: int = 13) -> None:
        """The handoff ends, after so many tokens; it is whole if these are all."""
        reservation = self.connector.loading["c"]
        prompt = [*PREFIX, 100]
        self.driver.worker.write(reservation.block_ids, prompt, 0, num_tokens)
        outcome = LoadOutcome.LOADED if num_tokens == len(prompt) else LoadOutcome.FAILED
        first = reference_tokens(prompt, 1, eos=-1)[0] if num_tokens == len(prompt) else None
        received = ReceivedKV(outcome, num_tokens, first, reason="link lost")
        self.driver.step(output_of(finished_recving={"c": received}))


def computed(request: Request) -> tuple[int, int]:
    """Return the tokens of a prompt that were computed, and those that were cached."""
    return request.num_prompt_tokens_computed, request.num_cached_tokens


def test_a_request_waits_for_a_prefix_that_arrives_for_another_one() -> None:
    engine = Engine()
    request = engine.add("a", [*PREFIX, 200, 201])
    engine.driver.step()
    assert engine.driver.steps[-1].is_empty()
    assert request.status is RequestStatus.WAITING
    engine.arrive()
    engine.driver.run()
    assert computed(request) == (2, 12)
    assert engine.driver.tokens_of("a") == reference_tokens([*PREFIX, 200, 201], 3, eos=-1)


def test_others_pass_it() -> None:
    engine = Engine()
    waiting, other = engine.add("a", [*PREFIX, 200]), engine.add("b", OTHERS)
    engine.driver.step()
    assert engine.driver.scheduled() == {"b": len(OTHERS)}
    assert (waiting.status, other.status) == (RequestStatus.WAITING, RequestStatus.RUNNING)
    engine.arrive()
    engine.driver.run()
    assert computed(waiting) == (1, 12)


def test_an_engine_without_other_prompts_waits_as_long_as_the_prefix_takes_to_compute() -> None:
    engine = Engine()
    request = engine.add("a", [*PREFIX, 200])
    engine.driver.step()
    began_s = engine.clock.now_s
    deadline_s = engine.driver.scheduler.next_deadline()
    assert deadline_s == began_s + 12 * TOKEN_S
    engine.clock.now_s = deadline_s - 0.01
    engine.driver.step()
    assert engine.driver.steps[-1].is_empty()
    engine.clock.now_s = deadline_s
    engine.driver.step()
    assert engine.driver.scheduled() == {"a": 13}
    assert computed(request) == (13, 0)
    assert engine.driver.scheduler.next_deadline() != deadline_s, "nothing waits any more"


def test_decodes_alone_do_not_prolong_the_wait() -> None:
    engine = Engine()
    engine.add("b", OTHERS, max_tokens=30)
    engine.driver.step()
    request = engine.add("a", [*PREFIX, 200])
    engine.driver.step()
    assert engine.driver.scheduled() == {"b": 1}
    engine.clock.now_s += 12 * TOKEN_S
    engine.driver.step()
    assert engine.driver.scheduled() == {"b": 1, "a": 13}
    assert request.status is RequestStatus.RUNNING


def test_an_engine_with_other_prompts_lets_it_wait_as_long_as_all_would_lose_by_its_computation() -> None:
    engine = Engine(max_num_batched_tokens=8)
    request = engine.add("a", [*PREFIX, 200])
    engine.driver.step()
    began_s = engine.clock.now_s
    for number in range(30):
        engine.add(f"o{number}", range(1000 + 20 * number, 1007 + 20 * number))
        engine.clock.now_s += 1.0
        engine.driver.step()
        if request.status is RequestStatus.RUNNING:
            break
    # There are two that wait for their turn in each step, and the step after the bound has a token left for it.
    assert began_s + 2 * 12 * TOKEN_S <= engine.clock.now_s <= began_s + 2 * 12 * TOKEN_S + 2.0


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, (13, 0)), (9, (5, 8))])
def test_a_load_that_fails_leaves_the_rest_to_be_computed(num_tokens: int, expected: tuple[int, int]) -> None:
    engine = Engine()
    request = engine.add("a", [*PREFIX, 200])
    engine.driver.step()
    engine.arrive(num_tokens)
    engine.driver.run()
    assert engine.driver.tokens_of("a") == reference_tokens([*PREFIX, 200], 3, eos=-1)
    assert computed(request) == expected


def test_a_request_may_be_aborted_while_it_waits() -> None:
    engine = Engine()
    engine.add("a", [*PREFIX, 200])
    engine.driver.step()
    engine.driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.driver.step()
    assert engine.driver.scheduler.next_deadline() == engine.clock.now_s + 1000.0, "only the load's own is left"
    engine.arrive()
    engine.driver.run()


@pytest.mark.parametrize(
    ("prompt", "token_s"),
    [
        pytest.param(range(3, 20), TOKEN_S, id="no prefix in common"),
        pytest.param([1, 2, 3, 9, 5, 6], TOKEN_S, id="less than a block in common"),
        pytest.param(range(1, 5), TOKEN_S, id="its only block holds its last token"),
        pytest.param([*PREFIX, 200], None, id="it is not known how fast the engine computes"),
    ],
)
def test_a_request_that_would_gain_nothing_does_not_wait(prompt: Sequence[int], token_s: float | None) -> None:
    engine = Engine(token_s=token_s)
    engine.add("a", prompt)
    engine.driver.step()
    assert engine.driver.scheduled() == {"a": len(prompt)}


def test_a_request_with_another_salt_does_not_wait() -> None:
    engine = Engine()
    engine.driver.scheduler.add_request(make_request("a", [*PREFIX, 200], cache_salt="another"))
    engine.driver.step()
    assert engine.driver.scheduled() == {"a": 13}, "its blocks are others"


def test_a_step_takes_a_bounded_number_of_requests_out_of_the_queue() -> None:
    loading = {"c": make_request("c", [*PREFIX, 100])}
    arriving = ArrivingPrefixes(
        loading, lambda request: request.num_tokens // BLOCK_SIZE, BLOCK_SIZE, lambda n: n * 1.0
    )
    arriving.begin_step()
    requests = [make_request(f"a{number}", [*PREFIX, 200 + number]) for number in range(MAX_WAITING + 3)]
    assert sum(arriving.begins_to_wait(request, 0, 1, 0.0) for request in requests) == MAX_WAITING


@settings(max_examples=200)
@given(
    common=st.lists(st.integers(0, 10), min_size=1, max_size=4),
    local=st.integers(0, 3),
    length=st.integers(1, 41),
)
def test_the_longest_prefix_on_its_way_counts(common: list[int], local: int, length: int) -> None:
    """Each loading prompt has some first blocks in common with the request's, and then others."""
    prompt = list(range(length))
    loading = {
        str(number): make_request(
            str(number), [*prompt[: blocks * BLOCK_SIZE], *range(1000 * number + 100, 1000 * number + 140)]
        )
        for number, blocks in enumerate(common)
    }
    asked: list[int] = []

    def compute_s(num_tokens: int) -> float:
        asked.append(num_tokens)
        return 1.0

    arriving = ArrivingPrefixes(loading, lambda request: request.num_tokens // BLOCK_SIZE, BLOCK_SIZE, compute_s)
    arriving.begin_step()
    waits = arriving.begins_to_wait(make_request("a", prompt), local, 1, 0.0)
    num_blocks = max(min(max(common), (length - 1) // BLOCK_SIZE) - local, 0)
    assert (waits, asked) == (num_blocks > 0, [num_blocks * BLOCK_SIZE] if num_blocks else [])


def test_fetches_know_how_fast_the_engine_computes_although_it_fetches_nothing() -> None:
    sources = PrefixSources(None, PrefixFetches("e", BLOCK_SIZE, max_fetches=0))
    assert sources.compute_s(8) is None
    sources.observe_steps(4, [1.0] * 3)
    assert sources.compute_s(8) == pytest.approx(2.0)


def test_the_engine_says_how_many_requests_wait_for_a_prefix() -> None:
    engine = Engine()
    for name in "ab":
        engine.add(name, [*PREFIX, 200 + ord(name)])
    engine.driver.step()
    assert engine.driver.scheduler.make_stats().num_waiting_by_reason["prefix"] == 2
    engine.arrive()
    engine.driver.step()
    assert engine.driver.scheduler.make_stats().num_waiting_by_reason["prefix"] == 0
    engine.driver.run()


def test_a_request_that_has_waited_once_is_not_looked_up_again_as_long_as_the_load_lasts() -> None:
    engine = Engine()
    request = engine.add("a", [*PREFIX, 200])
    engine.driver.step()
    lookups = []
    arriving = engine.driver.scheduler.remote.arriving
    arriving.begins_to_wait = lambda *args: bool(lookups.append(args))  # type: ignore[method-assign, func-returns-value]
    engine.driver.step()
    assert request.status is RequestStatus.WAITING
    assert not lookups
    engine.arrive()
    engine.driver.run()
    assert computed(request) == (1, 12)


@given(st.floats(0, 1e6), st.floats(1e-5, 10.0))
def test_nothing_waits_idly_beyond_its_deadline_whatever_the_sum_is_rounded_to(now_s: float, compute_s: float) -> None:
    """Else a simulation, whose clock goes from deadline to deadline, would never go on."""
    loading = {"c": make_request("c", [*PREFIX, 100])}
    arriving = ArrivingPrefixes(loading, lambda _: 3, BLOCK_SIZE, lambda _: compute_s)
    request = make_request("a", [*PREFIX, 200])
    arriving.begin_step()
    assert arriving.begins_to_wait(request, 0, 5, now_s)
    arriving.end_step(now_s, has_prompts=False)
    deadline_s = arriving.next_deadline()
    assert deadline_s is not None
    arriving.begin_step()
    assert not arriving.goes_on_waiting(request, 5, deadline_s)
    assert not arriving.begins_to_wait(request, 0, 5, deadline_s)
    arriving.end_step(deadline_s, has_prompts=True)
    assert arriving.next_deadline() is None
