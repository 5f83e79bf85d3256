from __future__ import annotations

from dataclasses import dataclass

import pytest

from actors.core.request import EngineCoreRequest
from actors.core.sampling_params import SamplingParams
from cluster.engine_connection import EngineDescriptor, EngineRole
from cluster.errors import NoEngineAvailable
from cluster.router.prefix_aware import PrefixAwarePair
from kv_transfer.params import PrefixSource

BLOCK_SIZE = 4
PROMPT = list(range(20))


@dataclass(frozen=True)
class _Load:
    descriptor: EngineDescriptor
    num_unfinished_requests: int = 0


def _engine(engine_id: str, role: EngineRole, num_unfinished_requests: int = 0, incarnation: int = 1) -> _Load:
    return _Load(EngineDescriptor(engine_id, incarnation, role, f"{engine_id}:1"), num_unfinished_requests)


def _request(prompt: list[int], salt: str | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(request_id="r", prompt_token_ids=prompt, sampling_params=SamplingParams(), cache_salt=salt)


P0, P1 = _engine("p0", EngineRole.PREFILL), _engine("p1", EngineRole.PREFILL)
D0, D1 = _engine("d0", EngineRole.DECODE), _engine("d1", EngineRole.DECODE)


def test_a_prompt_goes_where_its_prefix_is() -> None:
    router = PrefixAwarePair(BLOCK_SIZE)
    first = router.choose(_request(PROMPT), [P1, D1])
    assert (first.prefill, first.decode, first.prefix_source) == (P1, D1, None)
    again = router.choose(_request([*PROMPT, 7]), [P0, P1, D0, D1])
    assert (again.prefill, again.decode) == (P1, D1)


def test_a_prefix_is_not_worth_a_longer_queue() -> None:
    router = PrefixAwarePair(BLOCK_SIZE)
    router.choose(_request(PROMPT), [P1, D1])
    busy = _engine("p1", EngineRole.PREFILL, 2)
    route = router.choose(_request(PROMPT), [P0, busy, D0])
    assert route.prefill == P0
    assert route.prefix_source == PrefixSource(busy.descriptor.kv_address, 20), "its blocks can be fetched"


def test_prompts_without_a_prefix_are_spread_by_load() -> None:
    router = PrefixAwarePair(BLOCK_SIZE)
    busy = _engine("p0", EngineRole.PREFILL, 1)
    assert router.choose(_request(PROMPT), [busy, P1, D0]).prefill == P1


def test_the_answer_of_a_chat_is_fetched_from_the_engine_that_gave_it() -> None:
    router = PrefixAwarePair(BLOCK_SIZE)
    route = router.choose(_request(PROMPT), [P0, D0])
    answer = list(range(50, 62))
    router.on_end(_request(PROMPT), answer, route)
    next_turn = router.choose(_request([*PROMPT, *answer, 1, 2, 3]), [P0, D0])
    # 20 + 12 tokens, of which the last one was never computed from: 7 whole blocks.
    assert next_turn.prefix_source == PrefixSource(D0.descriptor.kv_address, 28)


def test_an_engine_that_does_both_fetches_from_another() -> None:
    router = PrefixAwarePair(BLOCK_SIZE)
    b0, b1 = _engine("b0", EngineRole.BOTH), _engine("b1", EngineRole.BOTH)
    assert router.choose(_request(PROMPT), [b0]).decode == b0
    route = router.choose(_request(PROMPT), [_engine("b0", EngineRole.BOTH, 3), b1])
    assert (route.prefill, route.decode) == (None, b1)
    assert route.prefix_source == PrefixSource(b0.descriptor.kv_address, 20)


def test_tenants_with_different_salts_share_nothing() -> None:
    router = PrefixAwarePair(BLOCK_SIZE)
    router.choose(_request(PROMPT, "a"), [P1, D1])
    route = router.choose(_request(PROMPT, "b"), [P0, P1, D0, D1])
    assert (route.prefill, route.prefix_source) == (P0, None)


def test_an_engines_next_life_is_no_source() -> None:
    router = PrefixAwarePair(BLOCK_SIZE)
    router.choose(_request(PROMPT), [P1, D1])
    reborn = _engine("p1", EngineRole.PREFILL, incarnation=2)
    assert router.choose(_request(PROMPT), [P0, reborn, D0]).prefix_source is None


def test_without_engines_nothing_is_noted() -> None:
    with pytest.raises(NoEngineAvailable):
        PrefixAwarePair(BLOCK_SIZE).choose(_request(PROMPT), [P0])
