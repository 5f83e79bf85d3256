"""Routes requests to engines that have their prefix cached, unless too many other requests are there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from actors.core.requests.block_hash import BlockHash, BlockHasher, BlockHashKey, ExtraKeys
from actors.core.requests.request import EngineCoreRequest
from cluster.routing.base import EngineT, Route, choose_pair
from cluster.routing.engine_connection import EngineDescriptor, EngineKey
from cluster.routing.pairing import find_refusal
from cluster.routing.prefixes.cached_prefix import CachedPrefix
from cluster.routing.prefixes.prefix_index import PrefixIndex
from kv_transfer.params import PrefixSource

_MAX_ADAPTERS = 10_000
MAX_TOKENS = 262_144
"""How many tokens of a prompt the router looks at; their blocks are hashed in 15 ms, and looked up in 10."""
_MAX_UNDER_WAY = 1 << 16
"""Requests whose hashes are kept until they end."""
_GROWTH = 4
"""The factor by which more of a prompt is hashed as long as engines have all of what is hashed."""


class PrefixAwarePair:
    """Chooses the pair of engines with the least work: unfinished requests, and the part of the prompt to compute.

    An unfinished request counts as much as this request would without any cached prefix. So a prefix that is cached as
    a whole makes up for one unfinished request. So does the request's adapter, at an engine that has probably loaded it
    because it got a request for it before. If another engine has more of the prefix than the engine that is to compute
    the prompt, the route names that other engine as a source to fetch from. A prefix counts up to MAX_TOKENS tokens.
    """

    def __init__(
        self,
        block_size: int,
        index: PrefixIndex | None = None,
        *,
        hash_key: BlockHashKey,
        is_aggregated: bool = False,
        hasher: BlockHasher | None = None,
    ) -> None:
        """Know no prefixes yet.

        block_size: block size of the engines' KV caches; prefixes are counted in such blocks, even those of an engine
                    whose own blocks have another size
        index:      remembers which engine has which blocks; None: an index of this router alone
        hash_key:   the cluster's key of block hashes
        is_aggregated: choose one engine for prefill and decode, of any role, even if there are pairs
        hasher:     hashes prompts; None: one of this block size and with this key
        """
        self._is_aggregated = is_aggregated
        self._hasher = BlockHasher(block_size, hash_key) if hasher is None else hasher
        self._index = PrefixIndex() if index is None else index
        self._newest: tuple[EngineCoreRequest | None, list[BlockHash]] = (None, [])
        """The request that was looked at last, and the hashes of its first blocks."""
        self._under_way: OrderedDict[str, tuple[EngineCoreRequest, list[BlockHash]]] = OrderedDict()
        """The requests that engines have, by id, with the hashes of their blocks: a prompt is hashed once."""
        self._adapters: OrderedDict[tuple[EngineKey, str], None] = OrderedDict()
        """Keys of an engine and of an adapter that the engine got a request for; the least recently used first."""

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT]:
        """Choose a pair, or one engine that prefills and decodes. Raises NoEngineAvailable."""
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        cached = self.find_cached(request)
        self.count_lookup(cached)

        def work(engine: EngineT) -> int:
            num_left = num_tokens - cached.get(engine.descriptor.key, 0)
            num_loads = not self.has_adapter(engine.descriptor.key, request)
            return (engine.num_unfinished_requests + num_loads) * num_tokens + num_left

        prefill, decode = choose_pair(engines, work, request.request_id, is_aggregated=self._is_aggregated)
        computing = decode if prefill is None else prefill
        return Route(prefill, decode, self.find_source(computing, engines, cached))

    def reroute(self, waiting_id: str, again: EngineCoreRequest, engines: Sequence[EngineT]) -> Route[EngineT] | None:
        """Let the request stay where it is: which engine would be quicker is not known."""
        return None

    def find_cached(self, request: EngineCoreRequest) -> CachedPrefix:
        """Return how many of the request's first tokens each engine probably has cached; without those that have none.

        The tokens are at most MAX_TOKENS, and whole blocks.
        """
        token_ids = _first_token_ids(request)
        num_all, num_hashed = len(token_ids) // self._hasher.block_size, self._index.stride
        while True:
            found = self._index.find(self._hash_beginning(request, token_ids, num_hashed))
            # An engine that has any block has those before it: where the longest prefix ends, hash no more. With
            # recurrent states a prefix may be longer than what is known of it.
            is_longest = not self._index.has_states and found.longest + self._index.stride <= num_hashed
            if num_hashed >= num_all or is_longest:
                break
            num_hashed *= _GROWTH
        return found.times(self._hasher.block_size)

    def find_under_way(self, request_id: str) -> CachedPrefix | None:
        """Return what find_cached() would for a request under way, without hashing it again; None if it is unknown."""
        known = self._under_way.get(request_id)
        return None if known is None else self._index.find(known[1]).times(self._hasher.block_size)

    def count_lookup(self, cached: Mapping[EngineKey, int]) -> None:
        """Count the look-up of one request's prefix. cached: what find_cached() has returned"""
        self._index.num_lookups += 1
        self._index.num_hits += bool(cached)

    def has_adapter(self, engine: EngineKey, request: EngineCoreRequest) -> bool:
        """Return whether an engine has probably loaded the request's adapter, or the request needs none."""
        return request.lora is None or (engine, request.lora.key) in self._adapters

    def on_start(self, request: EngineCoreRequest, route: Route[EngineT]) -> None:
        """Note that the route's engines will soon have the prompt's KV, and the request's adapter."""
        computing = route.decode if route.prefill is None else route.prefill
        keys = {computing.descriptor.key, route.decode.descriptor.key}
        # choose() has hashed as much as it had to look up; the rest is hashed now, when nobody waits for it.
        hashes = self._hash_beginning(request, _first_token_ids(request))
        self._index.add(keys, hashes)
        self._under_way[request.request_id] = request, hashes
        if len(self._under_way) > _MAX_UNDER_WAY:
            self._under_way.popitem(last=False)
        if request.lora is not None:
            for key in keys:
                self._note_adapter(key, request.lora.key)

    def _note_adapter(self, engine: EngineKey, adapter: str) -> None:
        self._adapters[engine, adapter] = None
        self._adapters.move_to_end((engine, adapter))
        if len(self._adapters) > _MAX_ADAPTERS:
            self._adapters.popitem(last=False)

    def on_end(self, request: EngineCoreRequest, output_token_ids: Sequence[int], route: Route[EngineT]) -> None:
        """Note that the decode engine has the KV of all tokens but the last one, which no step has read."""
        token_ids = (request.prompt_token_ids[:MAX_TOKENS] + list(output_token_ids))[:-1]
        started, hashes = self._under_way.pop(request.request_id, (request, []))
        hashes = list(hashes) if started.prompt_token_ids is request.prompt_token_ids else []
        self._extend(hashes, request, token_ids[:MAX_TOKENS])
        # A prompt that ends with a block was hashed as a whole, though its last token may not have been read.
        num_blocks = min(len(token_ids), MAX_TOKENS) // self._hasher.block_size
        self._index.add([route.decode.descriptor.key], hashes[:num_blocks])

    def on_leave(self, request_id: str) -> None:
        """Forget the request's hashes. Engines count their requests themselves, and keep what they have cached."""
        self._under_way.pop(request_id, None)

    def _hash_beginning(
        self, request: EngineCoreRequest, token_ids: list[int], max_blocks: int | None = None
    ) -> list[BlockHash]:
        """Hash the first max_blocks blocks of token_ids, or all; those that are hashed for this request are kept.

        token_ids: what _first_token_ids() returns
        """
        newest, hashes = self._newest
        if newest is None or not _is_copy(newest, request):
            hashes = []
            self._newest = request, hashes
        if max_blocks is None:
            self._extend(hashes, request, token_ids[:MAX_TOKENS])
            return hashes
        self._extend(hashes, request, token_ids[: min(max_blocks * self._hasher.block_size, MAX_TOKENS)])
        return hashes[:max_blocks]

    def _extend(self, hashes: list[BlockHash], request: EngineCoreRequest, token_ids: list[int]) -> None:
        """Append the hashes of those blocks of token_ids that are not among the hashes."""
        digest = None if request.prompt_embeds is None else request.prompt_embeds.digest
        lora_name = None if request.lora is None else request.lora.key
        keys = ExtraKeys(request.cache_salt, lora_name, request.mm_features, digest)
        self._hasher.extend(hashes, token_ids, keys)

    def find_source(
        self, computing: EngineT, engines: Sequence[EngineT], cached: Mapping[EngineKey, int]
    ) -> PrefixSource | None:
        """Return the engine that has most of the prefix, if that is more than the computing engine has, else None.

        Engines that cannot send blocks to the computing engine do not count.
        cached: what find_cached() has returned
        """
        num_tokens = cached.get(computing.descriptor.key, 0)
        source: EngineDescriptor | None = None
        for engine in engines:
            num_there = cached.get(engine.descriptor.key, 0)
            if num_there > num_tokens and can_serve_prefix(engine.descriptor, computing.descriptor):
                source, num_tokens = engine.descriptor, num_there
        return None if source is None else PrefixSource(source.kv_address, num_tokens)


def _is_copy(one: EngineCoreRequest, other: EngineCoreRequest) -> bool:
    """Return whether two requests are one, of which a copy may name the engine that encodes its images."""
    is_same_attempt = (one.request_id, len(one.output_token_ids)) == (other.request_id, len(other.output_token_ids))
    return is_same_attempt and one.prompt_token_ids is other.prompt_token_ids


def _first_token_ids(request: EngineCoreRequest) -> list[int]:
    """Return prompt and output tokens, or the prompt alone if it already has MAX_TOKENS."""
    if not request.output_token_ids or len(request.prompt_token_ids) >= MAX_TOKENS:
        return request.prompt_token_ids
    return request.prompt_token_ids + request.output_token_ids


def can_serve_prefix(source: EngineDescriptor, fetcher: EngineDescriptor) -> bool:
    """Return whether one engine can fetch cached blocks from another.

    A fetch names blocks by their hashes. So unlike a handoff it needs equal block sizes.
    """
    if find_refusal(source, fetcher) is not None:
        return False
    if source.pairing is None or fetcher.pairing is None:
        return True
    return source.pairing.block_size == fetcher.pairing.block_size
