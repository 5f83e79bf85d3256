from dataclasses import dataclass

import pytest

from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from cluster.errors import NoEngineAvailable
from cluster.routing.base import Route
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.routing.least_loaded import LeastLoadedPair

_REQUEST = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams())


@dataclass(frozen=True)
class _Load:
    descriptor: EngineDescriptor
    num_unfinished_requests: int


def _load(engine_id: str, role: EngineRole, num_unfinished_requests: int = 0) -> _Load:
    return _Load(EngineDescriptor(engine_id, 1, role, "host:1"), num_unfinished_requests)


def test_each_role_gives_its_least_loaded_engine() -> None:
    busy, idle = _load("p0", EngineRole.PREFILL, 3), _load("p1", EngineRole.PREFILL, 2)
    decode = _load("d0", EngineRole.DECODE, 9)

    assert LeastLoadedPair().choose(_REQUEST, [busy, decode, idle]) == Route(idle, decode)


def test_the_smaller_id_wins_a_tie() -> None:
    engines = [_load(name, role) for role in (EngineRole.PREFILL, EngineRole.DECODE) for name in ("b", "a")]

    route = LeastLoadedPair().choose(_REQUEST, engines)

    assert route.prefill is engines[1]
    assert route.decode is engines[3]


def test_a_pair_goes_before_an_engine_that_does_both() -> None:
    prefill, decode = _load("p", EngineRole.PREFILL, 5), _load("d", EngineRole.DECODE, 5)

    assert LeastLoadedPair().choose(_REQUEST, [_load("b", EngineRole.BOTH), prefill, decode]) == Route(prefill, decode)


def test_an_engine_that_does_both_serves_alone_where_a_pair_is_incomplete() -> None:
    both = [_load("b0", EngineRole.BOTH, 2), _load("b1", EngineRole.BOTH, 1)]

    assert LeastLoadedPair().choose(_REQUEST, [_load("p", EngineRole.PREFILL), *both]) == Route(None, both[1])


def test_decode_engines_serve_alone_when_no_prefill_engine_is_left() -> None:
    engines = [_load("b", EngineRole.DECODE, 1), _load("a", EngineRole.DECODE, 2)]

    assert LeastLoadedPair().choose(_REQUEST, engines) == Route(None, engines[0])


def test_prefill_engines_serve_alone_when_no_engine_is_left_that_decodes() -> None:
    engines = [_load("b", EngineRole.PREFILL, 1), _load("a", EngineRole.PREFILL, 2)]

    assert LeastLoadedPair().choose(_REQUEST, engines) == Route(None, engines[0])


def test_without_any_engine_there_is_no_route() -> None:
    with pytest.raises(NoEngineAvailable, match="no engine serves"):
        LeastLoadedPair().choose(_REQUEST, list[_Load]())
