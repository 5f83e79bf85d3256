"""Chooses which of a request's items the encoder computes in a step, and how far the prompt can go with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from actors.config import SchedulerConfig
from actors.core.encoder.encoder_cache_manager import EncoderCacheManager
from actors.core.requests.multimodal import find_feature_mistake
from actors.core.requests.request import Request


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """The encoder's part of one chunk: a decision that is not carried out yet.

    input_ids:      items to allocate and to compute
    held_ids:       items found in the cache that the request holds since this choice, not since an earlier chunk
    num_new_tokens: how many tokens the chunk can have
    num_embeds:     embeddings of input_ids, which count against the step's encoder budget
    """

    input_ids: list[int]
    held_ids: list[int]
    num_new_tokens: int
    num_embeds: int


def schedule_encoder_inputs(
    request: Request,
    num_computed_tokens: int,
    num_new_tokens: int,
    encoder_compute_budget: int,
    cache: EncoderCacheManager,
) -> EncoderInputs:
    """Choose the items that the chunk of num_new_tokens after num_computed_tokens touches and that have to be encoded.

    An item that cannot be encoded now ends the chunk just before the item; a chunk that would begin inside the item has
    no tokens at all.
    """
    input_ids: list[int] = []
    held_ids: list[int] = []
    hashes: set[str] = set()
    held_before = cache.get_cached_input_ids(request)
    num_embeds = 0
    for input_id, feature in enumerate(request.mm_features):
        if feature.offset >= num_computed_tokens + num_new_tokens:
            break
        if feature.end <= num_computed_tokens or feature.encoder_key in hashes or input_id in held_before:
            continue
        if cache.check_and_update_cache(request, input_id):
            held_ids.append(input_id)
        elif cache.can_allocate(request, input_id, encoder_compute_budget - num_embeds, num_embeds):
            input_ids.append(input_id)
            hashes.add(feature.encoder_key)
            num_embeds += feature.num_embeds
        else:
            num_new_tokens = max(0, feature.offset - num_computed_tokens)
            break
    return EncoderInputs(input_ids, held_ids, num_new_tokens, num_embeds)


@dataclass(slots=True)
class EncoderStep:
    """The encoder's part of one step.

    Invariant: once every request is taken, given up or refunded, only requests that are in the step have inputs.

    budget: embeddings that the step may still compute
    inputs: ids of the items that the step computes, by request id
    """

    cache: EncoderCacheManager
    budget: int
    inputs: dict[str, list[int]] = field(default_factory=dict)

    def choose(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> EncoderInputs:
        """Choose a chunk's items. The caller then calls either take() or give_up() with the choice."""
        return schedule_encoder_inputs(request, num_computed_tokens, num_new_tokens, self.budget, self.cache)

    def take(self, request: Request, chosen: EncoderInputs, num_computed_tokens: int) -> None:
        """Carry out a choice: allocate the items, and add them to the step."""
        for input_id in chosen.input_ids:
            self.cache.allocate(request, input_id)
        for input_id, feature in enumerate(request.mm_features):
            # An item that appears twice in a chunk is encoded once, and counted as held twice.
            if feature.end > num_computed_tokens and feature.offset < num_computed_tokens + chosen.num_new_tokens:
                self.cache.check_and_update_cache(request, input_id)
        if chosen.input_ids:
            # This request may already have items here that it got from a preempted request.
            self.inputs.setdefault(request.request_id, []).extend(chosen.input_ids)
        self.budget -= chosen.num_embeds

    def give_up(self, request: Request, chosen: EncoderInputs) -> None:
        """Undo a choice whose chunk is not scheduled: release its held items, and pass on those that a victim left."""
        inputs = self.inputs.pop(request.request_id, [])
        self._pass_on(request, [input_id for input_id in inputs if input_id in chosen.held_ids])
        if kept := [input_id for input_id in inputs if input_id not in chosen.held_ids]:
            self.inputs[request.request_id] = kept
        for input_id in chosen.held_ids:
            self.cache.free_encoder_input(request, input_id)

    def refund(self, request: Request) -> None:
        """Take a request back out of the step. An item that others hold too is computed for one of them instead."""
        self._pass_on(request, self.inputs.pop(request.request_id, []))

    def _pass_on(self, request: Request, input_ids: Iterable[int]) -> None:
        for input_id in input_ids:
            heir = self.cache.revoke(request, input_id)
            if heir is None:
                self.budget += request.mm_features[input_id].num_embeds
            else:
                self.inputs.setdefault(heir[0], []).append(heir[1])


def find_encoder_refusal(request: Request, config: SchedulerConfig) -> str | None:
    """Say, with the numbers, why the request's items could never be encoded, or return None."""
    if (mistake := find_feature_mistake(request.mm_features, request.num_prompt_tokens)) is not None:
        return mistake
    limit = min(config.max_num_encoder_input_tokens, config.encoder_cache_size)
    limits = (
        f"a step takes max_num_encoder_input_tokens = {config.max_num_encoder_input_tokens} and the cache "
        f"encoder_cache_size = {config.encoder_cache_size}"
    )
    for number, feature in enumerate(request.mm_features):
        if feature.num_embeds > limit:
            return f"multimodal item {number} has {feature.num_embeds} embeddings, {limits}"
    num_embeds = sum({feature.encoder_key: feature.num_embeds for feature in request.mm_features}.values())
    if not config.enable_chunked_prefill and num_embeds > limit:
        return f"the prompt's items have {num_embeds} embeddings, {limits}, and enable_chunked_prefill is off"
    return None
