from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest

from actors.core.requests.adapter import Adapter
from actors.core.requests.block_hash import PUBLIC_KEY, BlockHash, BlockHasher, ExtraKeys
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from cluster.errors import NoEngineAvailable
from cluster.routing.base import Route
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.routing.prefix_aware import MAX_TOKENS, PrefixAwarePair
from cluster.routing.prefixes.prefix_index import PrefixIndex
from kv_transfer.handoff.control_messages import PROTOCOL_VERSION
from kv_transfer.links.link_compatibility import PairingFacts
from kv_transfer.params import PrefixSource

BLOCK_SIZE = 4
PROMPT = list(range(20))
FACTS = PairingFacts(PROTOCOL_VERSION, "tcp", False, "m", "float32", 2, 2, 8, BLOCK_SIZE, False)


@dataclass(frozen=True)
class _Load:
    descriptor: EngineDescriptor
    num_unfinished_requests: int = 0


def _engine(
    engine_id: str,
    role: EngineRole,
    num_unfinished_requests: int = 0,
    incarnation: int = 1,
    pairing: PairingFacts | None = None,
) -> _Load:
    descriptor = EngineDescriptor(engine_id, incarnation, role, f"{engine_id}:1", pairing=pairing)
    return _Load(descriptor, num_unfinished_requests)


_NUMBERS = itertools.count()


def _request(prompt: list[int], salt: str | None = None) -> EngineCoreRequest:
    request_id = f"r{next(_NUMBERS)}"
    return EngineCoreRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling_params=SamplingParams(), cache_salt=salt
    )


def _send(router: PrefixAwarePair, request: EngineCoreRequest, engines: list[_Load]) -> Route[_Load]:
    route = router.choose(request, engines)
    router.on_start(request, route)
    return route


P0, P1 = _engine("p0", EngineRole.PREFILL), _engine("p1", EngineRole.PREFILL)
D0, D1 = _engine("d0", EngineRole.DECODE), _engine("d1", EngineRole.DECODE)


def test_a_prompt_goes_where_its_prefix_is() -> None:
    router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)
    first = _send(router, _request(PROMPT), [P1, D1])
    assert (first.prefill, first.decode, first.prefix_source) == (P1, D1, None)
    again = _send(router, _request([*PROMPT, 7]), [P0, P1, D0, D1])
    assert (again.prefill, again.decode) == (P1, D1)


def test_a_prefix_is_not_worth_a_longer_queue() -> None:
    router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)
    _send(router, _request(PROMPT), [P1, D1])
    busy = _engine("p1", EngineRole.PREFILL, 2)
    route = _send(router, _request(PROMPT), [P0, busy, D0])
    assert route.prefill == P0
    assert route.prefix_source == PrefixSource(busy.descriptor.kv_address, 20), "its blocks can be fetched"


def test_who_has_a_prefix_is_known_as_soon_as_it_was_sent_there_and_not_before() -> None:
    router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)
    route = router.choose(_request(PROMPT), [P1, D1])
    assert router.choose(_request(PROMPT), [P0, P1, D0]).prefill == P0
    router.on_start(_request(PROMPT), route)
    assert router.choose(_request(PROMPT), [P0, P1, D0]).prefill == P1


def test_prompts_without_a_prefix_are_spread_by_load() -> None:
    router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)
    busy = _engine("p0", EngineRole.PREFILL, 1)
    assert _send(router, _request(PROMPT), [busy, P1, D0]).prefill == P1


def test_the_answer_of_a_chat_is_fetched_from_the_engine_that_gave_it() -> None:
    router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)
    route = _send(router, _request(PROMPT), [P0, D0])
    answer = list(range(50, 62))
    router.on_end(_request(PROMPT), answer, route)
    next_turn = _send(router, _request([*PROMPT, *answer, 1, 2, 3]), [P0, D0])
    # 20 + 12 tokens, of which the last one was never computed from: 7 whole blocks.
    assert next_turn.prefix_source == PrefixSource(D0.descriptor.kv_address, 28)


def test_the_state_is_fetched_from_where_it_is_known_to_be() -> None:
    index = PrefixIndex()
    router = PrefixAwarePair(BLOCK_SIZE, index, hash_key=PUBLIC_KEY)
    for engine in (P0, D0):
        index.note_engine(engine.descriptor.key, 1000, has_states=True)
    request = _request(PROMPT)
    assert _send(router, request, [P0, D0]).prefix_source is None
    assert _send(router, _request(PROMPT), [P0, D0]).prefix_source is None, "what was sent there is no hint"
    hashes = BlockHasher(BLOCK_SIZE, PUBLIC_KEY)
    known: list[bytes] = []
    hashes.extend(known, PROMPT, ExtraKeys())
    index.store(D0.descriptor.key, np.frombuffer(known[3][:8], "<u8"), np.array([3], dtype=np.uint32))
    assert _send(router, _request(PROMPT), [P0, D0]).prefix_source == PrefixSource(D0.descriptor.kv_address, 16)


def test_an_engine_that_does_both_fetches_from_another() -> None:
    router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)
    b0, b1 = _engine("b0", EngineRole.BOTH), _engine("b1", EngineRole.BOTH)
    assert _send(router, _request(PROMPT), [b0]).decode == b0
    route = _send(router, _request(PROMPT), [_engine("b0", EngineRole.BOTH, 3), b1])
    assert (route.prefill, route.decode) == (None, b1)
    assert route.prefix_source == PrefixSource(b0.descriptor.kv_address, 20)


def test_tenants_with_different_salts_share_nothing() -> None:
    router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)
    _send(router, _request(PROMPT, "a"), [P1, D1])
    route = _send(router, _request(PROMPT, "b"), [P0, P1, D0, D1])
    assert (route.prefill, route.prefix_source) == (P0, None)


def test_an_engines_next_incarnation_is_no_source() -> None:
    router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)
    _send(router, _request(PROMPT), [P1, D1])
    reborn = _engine("p1", EngineRole.PREFILL, incarnation=2)
    assert _send(router, _request(PROMPT), [P0, reborn, D0]).prefix_source is None


def test_an_engine_that_cannot_send_it_is_no_source_for_a_prefix() -> None:
    router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)
    holders = [
        _engine(f"b{number}", EngineRole.BOTH, pairing=pairing)
        for number, pairing in enumerate((FACTS, replace(FACTS, dtype="float16"), replace(FACTS, block_size=8), None))
    ]
    for holder in holders:
        assert _send(router, _request(PROMPT), [holder]).decode == holder
    computing = _engine("c", EngineRole.BOTH, pairing=FACTS)
    sources = []
    for holder in holders:
        busy = replace(holder, num_unfinished_requests=9)
        route = _send(router, _request([*PROMPT, 1]), [busy, replace(computing, num_unfinished_requests=1)])
        sources.append(route.prefix_source and route.prefix_source.peer.engine_id)
        computing = _engine(f"c{len(sources)}", EngineRole.BOTH, pairing=FACTS)
    assert sources == ["b0", None, None, "b3"], "another dtype, and blocks of another size, do not help"


def test_a_prefix_does_not_bring_two_engines_together_that_cannot_hand_over() -> None:
    router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)
    other = replace(FACTS, dtype="float16")
    p0, p1 = (_engine(f"p{n}", EngineRole.PREFILL, pairing=facts) for n, facts in enumerate((FACTS, other)))
    d0, d1 = (_engine(f"d{n}", EngineRole.DECODE, pairing=facts) for n, facts in enumerate((FACTS, other)))
    _send(router, _request(PROMPT), [p1, d1])
    assert _send(router, _request(PROMPT), [p0, p1, d0]).prefill == p0, "p1 has the prefix, and no decode engine"
    both_have_it = _send(router, _request(PROMPT), [p0, p1, d1])
    assert (both_have_it.prefill, both_have_it.decode) == (p1, d1)


def test_without_engines_nothing_is_noted() -> None:
    with pytest.raises(NoEngineAvailable):
        PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY).choose(_request(PROMPT), list[_Load]())


def test_an_adapter_is_worth_one_place_in_the_queue_where_it_was_used_before() -> None:
    router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)
    sql = replace(_request(PROMPT), lora=Adapter("sql", "/adapters/sql", "1"))
    _send(router, sql, [P1, D1])
    other_prompt = replace(sql, prompt_token_ids=list(range(50, 70)))
    again = _send(router, other_prompt, [P0, P1, D0, D1])
    assert (again.prefill, again.decode) == (P1, D1)
    busier = _engine("p1", EngineRole.PREFILL, 1), _engine("d1", EngineRole.DECODE, 2)
    assert _send(router, replace(sql, prompt_token_ids=[7] * 20), [P0, busier[0], D0, busier[1]]).decode == D0
    unlike = replace(sql, lora=Adapter("sql", "/adapters/sql", "2"), prompt_token_ids=[9] * 20)
    # Nothing is known of these weights, so equal engines are drawn by the requests' ids.
    routes = [router.choose(replace(unlike, request_id=f"u{number}"), [P0, P1, D0, D1]) for number in range(16)]
    assert {route.prefill for route in routes} == {P0, P1}, "other weights under the same name are elsewhere"


def test_of_very_long_prompts_the_beginning_is_looked_at() -> None:
    router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)
    prompt = [number % 1000 for number in range(MAX_TOKENS + 100)]
    route = _send(router, _request(prompt), [P1, D1])
    router.on_end(_request(prompt), [1, 2, 3, 4, 5], route)
    assert _send(router, _request(prompt), [P0, P1, D0, D1]).prefill == P1
    busy = _engine("p1", EngineRole.PREFILL, 2)
    elsewhere = router.choose(_request(prompt), [P0, busy, D0])
    assert (elsewhere.prefill, elsewhere.prefix_source) == (P0, PrefixSource(busy.descriptor.kv_address, MAX_TOKENS))
    assert len(router._index) == MAX_TOKENS // BLOCK_SIZE


@pytest.mark.parametrize(
    ("num_shared_blocks", "at_choice"),
    [
        pytest.param(0, 1, id="nobody has its first block"),
        pytest.param(3, 4, id="a short prefix: the rest is hashed when the request has started"),
        pytest.param(30, 64, id="a longer prefix"),
        pytest.param(100, 100, id="engines have the whole prompt"),
    ],
)
def test_each_block_is_hashed_once_and_at_the_choice_hardly_more_than_engines_have(
    num_shared_blocks: int, at_choice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)
    prompt = list(range(100 * BLOCK_SIZE))
    num_shared = num_shared_blocks * BLOCK_SIZE
    _send(router, _request([*prompt[:num_shared], *[7] * (len(prompt) - num_shared)]), [P0, D0])
    num_hashed: list[int] = []
    extend = BlockHasher.extend

    def count(self: BlockHasher, hashes: list[BlockHash], token_ids: list[int], keys: ExtraKeys) -> None:
        num_before = len(hashes)
        extend(self, hashes, token_ids, keys)
        num_hashed.append(len(hashes) - num_before)

    monkeypatch.setattr(BlockHasher, "extend", count)
    request = _request(prompt)
    assert dict(router.find_cached(request)) == (
        {one.descriptor.key: num_shared for one in (P0, D0)} if num_shared else {}
    )
    assert sum(num_hashed) == at_choice
    router.on_start(request, Route(P0, D0))
    assert sum(num_hashed) == 100
    assert dict(router.find_cached(_request(prompt))) == {one.descriptor.key: len(prompt) for one in (P0, D0)}
    num_hashed.clear()
    router.on_end(request, [7] * (9 * BLOCK_SIZE + 1), Route(P0, D0))
    assert sum(num_hashed) == 9, "the prompt is known"


def test_the_end_of_a_request_notes_the_same_whether_its_hashes_are_known_or_not() -> None:
    answers: tuple[list[int], ...] = ([], [50], [*range(50, 62)])
    for answer in answers:
        fetched = []
        for is_known in (True, False):
            router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)
            request = _request(PROMPT)
            if is_known:
                _send(router, request, [P0])
            router.on_end(request, answer, Route(None, D0))
            fetched.append(router.find_cached(_request([*PROMPT, *answer, 1, 2, 3]))[D0.descriptor.key])
        assert fetched == [(len(PROMPT) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE] * 2


def test_the_hashes_of_a_request_are_kept_until_it_ends_or_leaves() -> None:
    router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)
    ended, left = _request(PROMPT), _request(PROMPT)
    routes = [_send(router, request, [P0, D0]) for request in (ended, left)]
    assert list(router._under_way) == [ended.request_id, left.request_id]
    router.on_end(ended, [1], routes[0])
    router.on_leave(left.request_id)
    router.on_leave("unknown")
    assert not router._under_way


def test_prompts_are_counted_and_those_of_which_an_engine_has_a_prefix() -> None:
    index = PrefixIndex()
    router = PrefixAwarePair(BLOCK_SIZE, index, hash_key=PUBLIC_KEY)
    _send(router, _request(PROMPT), [P0, D0])
    _send(router, _request(PROMPT), [P0, D0])
    _send(router, _request([7] * 20), [P0, D0])
    assert (index.num_lookups, index.num_hits) == (3, 1)


def test_an_aggregated_router_lets_any_engine_do_all_of_a_request_although_there_is_a_pair() -> None:
    router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY, is_aggregated=True)
    encode, busy = _engine("e0", EngineRole.ENCODE), _engine("b0", EngineRole.BOTH, 3)
    engines = [encode, busy, _engine("p0", EngineRole.PREFILL), _engine("d0", EngineRole.DECODE)]
    routes = [router.choose(_request([number] * 20), engines) for number in range(64)]
    assert {route.prefill for route in routes} == {None}
    assert {route.decode.descriptor.engine_id for route in routes} == {"p0", "d0"}, "the idle ones, of either role"
    with pytest.raises(NoEngineAvailable):
        router.choose(_request(PROMPT), [encode])


def test_a_prompt_goes_where_its_prefix_is_if_the_index_keeps_every_fourth_block_only() -> None:
    index = PrefixIndex(2**20)
    index.note_engine(("p9", 1), 20_000)
    router = PrefixAwarePair(BLOCK_SIZE, index, hash_key=PUBLIC_KEY)
    assert index.stride == 4
    _send(router, _request(PROMPT), [P1, D1])
    again = _send(router, _request([*PROMPT, 7]), [P0, P1, D0, D1])
    assert (again.prefill, again.decode) == (P1, D1)


def test_what_is_cached_of_a_request_under_way_is_found_without_hashing_it_again() -> None:
    router = PrefixAwarePair(BLOCK_SIZE, hash_key=PUBLIC_KEY)
    wanted = _request(PROMPT)
    assert router.find_under_way(wanted.request_id) is None
    _send(router, wanted, [P0, D0])
    assert router.find_under_way(wanted.request_id) == router.find_cached(wanted) != {}
    router.on_leave(wanted.request_id)
    assert router.find_under_way(wanted.request_id) is None
