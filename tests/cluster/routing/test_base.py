"""Engines that may be chosen together, whatever the policy.

Tests of cluster/routing/pairing.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.requests.block_hash import PUBLIC_KEY
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from cluster.routing.base import Candidates, Route, Router, candidates, choose_pair
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.routing.least_loaded import LeastLoadedPair
from cluster.routing.pairing import RefusedPair, find_refusal, refused_pairs
from cluster.routing.prefix_aware import PrefixAwarePair
from kv_transfer.handoff.control_messages import PROTOCOL_VERSION
from kv_transfer.links.link_compatibility import PairingFacts

BLOCK_SIZE = 4
A = PairingFacts(PROTOCOL_VERSION, "tcp", False, "m", "float32", 2, 2, 8, BLOCK_SIZE, False)
B = replace(A, dtype="bfloat16")
C = replace(A, block_size=8)
P, D, BOTH = EngineRole.PREFILL, EngineRole.DECODE, EngineRole.BOTH


@dataclass(frozen=True)
class Load:
    descriptor: EngineDescriptor
    num_unfinished_requests: int = 0


def load(
    engine_id: str, role: EngineRole, pairing: PairingFacts | None = A, num_requests: int = 0, version: int = 1
) -> Load:
    return Load(EngineDescriptor(engine_id, 1, role, "host:1", (), pairing, version), num_requests)


def groups(*engines: Load) -> list[tuple[str, str]]:
    def names(loads: list[Load]) -> str:
        return " ".join(engine.descriptor.engine_id for engine in loads)

    return [(names(group.prefill), names(group.decode)) for group in candidates(engines)]


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ([load("p", P), load("q", P), load("d", D), load("e", D)], [("p q", "d e")]),
        ([load("p", P), load("q", P, B), load("d", D), load("e", D, B)], [("p", "d"), ("q", "e")]),
        ([load("p", P), load("d", D, C)], [("p", "d")]),
        ([load("p", P, None), load("d", D, B)], [("p", "d")]),
        ([load("p", P), load("d", D), load("e", D, B)], [("p", "d"), ("", "e")]),
        ([load("p", P), load("d", D, B)], [("", "d")]),
        ([load("p", P), load("d", D, B), load("b", BOTH)], [("", "b")]),
        ([load("p", P), load("d", D), load("b", BOTH)], [("p", "d")]),
        ([load("p", P, version=2), load("d", D)], [("", "d")]),
        ([load("d", D), load("e", D, B)], [("", "d e")]),
        ([load("p", P), load("b", BOTH, B)], [("", "b")]),
        ([load("p", P), load("q", P, B)], [("", "p q")]),
    ],
    ids=[
        "all of a kind",
        "two kinds",
        "block sizes that are multiples",
        "nothing known",
        "a decode engine without a partner serves alone beside a pair",
        "no pair",
        "no pair, but one that does both",
        "one that does both waits for pairs to be gone",
        "another model version",
        "no prefill engine",
        "no decode engine, but one that does both",
        "last resort",
    ],
)
def test_who_may_work_together(engines: list[Load], expected: list[tuple[str, str]]) -> None:
    assert groups(*engines) == expected


def test_the_least_work_of_two_engines_together_decides_between_kinds() -> None:
    engines = [load("p", P, A, 5), load("d", D, A, 0), load("q", P, B, 2), load("e", D, B, 2)]
    assert choose_pair(engines, lambda engine: engine.num_unfinished_requests, "r") == (engines[2], engines[3])


def test_an_engine_that_serves_alone_has_the_work_of_both() -> None:
    alone, pair = load("e", D, B, 2), [load("p", P, A, 3), load("d", D, A, 0)]

    def num_requests(engine: Load) -> int:
        return engine.num_unfinished_requests

    assert choose_pair([*pair, alone], num_requests, "r") == (pair[0], pair[1])
    idle = load("e", D, B, 1)
    assert choose_pair([*pair, idle], num_requests, "r") == (None, idle)
    assert choose_pair([load("p", P), load("d", D), load("a", D, B)], num_requests, "r")[0] is not None, (
        "a pair goes first"
    )


LOADS = st.builds(
    load,
    st.text("abcdef", min_size=1, max_size=2),
    st.sampled_from(EngineRole),
    st.sampled_from([A, B, C, None]),
    st.integers(0, 3),
    st.sampled_from([1, 2]),
)
FLEETS = st.lists(LOADS, min_size=1, max_size=8, unique_by=lambda engine: engine.descriptor.engine_id).filter(
    lambda engines: any(engine.descriptor.role is not EngineRole.ENCODE for engine in engines)
)
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@pytest.mark.parametrize("router_of", [LeastLoadedPair, lambda: PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)])
@given(rounds=st.lists(st.tuples(FLEETS, PROMPTS), min_size=1, max_size=6))
def test_no_router_ever_brings_two_engines_together_that_cannot_exchange_kv(
    router_of: type[LeastLoadedPair], rounds: list[tuple[list[Load], list[int]]]
) -> None:
    router: Router = router_of()
    for engines, prompt in rounds:
        request = EngineCoreRequest(request_id="r", prompt_token_ids=prompt, sampling_params=SamplingParams())
        route: Route[Load] = router.choose(request, engines)
        router.on_start(request, route)
        by_id = {engine.descriptor.engine_id: engine.descriptor for engine in engines}
        computing = (route.prefill or route.decode).descriptor
        assert EngineRole.ENCODE not in (computing.role, route.decode.descriptor.role)
        assert find_refusal(computing, route.decode.descriptor) is None
        if route.prefill is not None:
            assert (route.prefill.descriptor.role, route.decode.descriptor.role) == (P, D)
        if route.prefix_source is not None:
            assert find_refusal(by_id[route.prefix_source.peer.engine_id], computing) is None


@given(engines=FLEETS)
def test_every_group_of_candidates_can_work_together_and_some_engine_always_serves(engines: list[Load]) -> None:
    found: list[Candidates[Load]] = candidates(engines)
    assert found
    for group in found:
        assert group.decode
        assert all(engine.descriptor.role is not EngineRole.ENCODE for engine in (*group.prefill, *group.decode))
        assert all(find_refusal(p.descriptor, d.descriptor) is None for p in group.prefill for d in group.decode)


def test_the_pairs_that_cannot_hand_over_are_listed_with_the_reason() -> None:
    engines = [load("p0", P), load("p1", P, B), load("d0", D), load("b0", BOTH, B), load("d1", D, None, version=2)]
    assert refused_pairs(engine.descriptor for engine in engines) == (
        RefusedPair("p0", "d1", "model version: 1 at p0, 2 at d1"),
        RefusedPair("p1", "d0", "dtype: 'bfloat16' at p1, 'float32' at d0"),
        RefusedPair("p1", "d1", "model version: 1 at p1, 2 at d1"),
    )


def test_the_prefill_engines_to_which_no_embeddings_can_travel_are_listed() -> None:
    engines = [load("p0", P), load("p1", P, B), load("d0", D, None), load("e0", EngineRole.ENCODE, C)]
    assert refused_pairs(engine.descriptor for engine in engines) == (
        RefusedPair("e0", "p1", "dtype: 'float32' at e0, 'bfloat16' at p1"),
    )
