from dataclasses import dataclass

import pytest

from cluster.engine_connection import EngineDescriptor, EngineRole
from cluster.errors import NoEngineAvailable
from cluster.router.base import Route
from cluster.router.least_loaded import LeastLoadedPair


@dataclass(frozen=True)
class _Load:
    descriptor: EngineDescriptor
    num_unfinished_requests: int


def _load(engine_id: str, role: EngineRole, num_unfinished_requests: int = 0) -> _Load:
    return _Load(EngineDescriptor(engine_id, 1, role, "host:1"), num_unfinished_requests)


def test_each_role_gives_its_least_loaded_engine() -> None:
    busy, idle = _load("p0", EngineRole.PREFILL, 3), _load("p1", EngineRole.PREFILL, 2)
    decode = _load("d0", EngineRole.DECODE, 9)

    assert LeastLoadedPair().choose(10, [busy, decode, idle]) == Route(idle, decode)


def test_the_smaller_id_wins_a_tie() -> None:
    engines = [_load(name, role) for role in (EngineRole.PREFILL, EngineRole.DECODE) for name in ("b", "a")]

    route = LeastLoadedPair().choose(10, engines)

    assert route.prefill is engines[1]
    assert route.decode is engines[3]


def test_a_pair_goes_before_an_engine_that_does_both() -> None:
    prefill, decode = _load("p", EngineRole.PREFILL, 5), _load("d", EngineRole.DECODE, 5)

    assert LeastLoadedPair().choose(10, [_load("b", EngineRole.BOTH), prefill, decode]) == Route(prefill, decode)


def test_an_engine_that_does_both_serves_alone_where_a_pair_is_incomplete() -> None:
    both = [_load("b0", EngineRole.BOTH, 2), _load("b1", EngineRole.BOTH, 1)]

    assert LeastLoadedPair().choose(10, [_load("p", EngineRole.PREFILL), *both]) == Route(None, both[1])


@pytest.mark.parametrize(
    ("roles", "missing"),
    [([], ("prefill", "decode")), ([EngineRole.DECODE], ("prefill",)), ([EngineRole.PREFILL], ("decode",))],
)
def test_the_missing_role_is_named(roles: list[EngineRole], missing: tuple[str, ...]) -> None:
    with pytest.raises(NoEngineAvailable, match=" or ".join(missing)) as raised:
        LeastLoadedPair().choose(10, [_load(role.value, role) for role in roles])

    assert raised.value.missing_roles == missing
