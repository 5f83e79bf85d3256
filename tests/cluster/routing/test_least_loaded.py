import itertools
from dataclasses import dataclass, replace

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


def test_requests_spread_over_idle_engines() -> None:
    roles = (EngineRole.PREFILL, EngineRole.DECODE)
    engines = [_load(f"{role}-{number}", role) for role in roles for number in (0, 1)]
    routes = [LeastLoadedPair().choose(replace(_REQUEST, request_id=f"r{n}"), engines) for n in range(448)]
    for chosen in ([route.prefill for route in routes], [route.decode for route in routes]):
        assert 0.4 < sum(engine in (engines[0], engines[2]) for engine in chosen) / 448 < 0.6
    together = sum(route.prefill is engines[0] and route.decode is engines[2] for route in routes)
    assert 0.15 < together / 448 < 0.35, "the engines of a pair are drawn independently"


def test_the_same_request_goes_to_the_same_engine_whatever_their_order() -> None:
    engines = [_load(name, EngineRole.BOTH) for name in "abcd"]
    chosen = LeastLoadedPair().choose(_REQUEST, engines).decode
    assert all(LeastLoadedPair().choose(_REQUEST, order).decode is chosen for order in itertools.permutations(engines))


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
