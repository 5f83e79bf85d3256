"""Checks a request against the loaded model when the request enters an engine.

Fields have ranges of their own (request.py), which are checked when a request is decoded. The scheduler checks whether
a request has room and what it needs (feasibility.py). The checks here find mistakes that would otherwise raise inside a
step and end the engine: tokens outside the model's vocabulary, arrays whose size contradicts their shape, a peer that
this model cannot exchange KV with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from actors.core.requests.multimodal import EMBEDDINGS, EncoderInput, MultiModalFeature, PackedArray
from actors.core.requests.request import EngineCoreRequest, PromptEmbeds
from actors.core.requests.sampling_params import SamplingParams
from kv_transfer.layout import rank_kv_heads
from kv_transfer.params import EngineAddress, KVTransferParams

_FLOAT_SIZES: Final[Mapping[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}
_ARRAY_SIZES: Final[Mapping[str, int]] = {**_FLOAT_SIZES, "float64": 8, "int64": 8, "int32": 4}
DescribedArray: TypeAlias = tuple[str, tuple[int, ...], int]
"""dtype, shape and size in bytes of an array."""
_GRID: Final = "image_grid_thw"
_PIXELS: Final = "pixel_values"


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """The arrays that an image encoder takes for one image, and the embeddings that it makes of them.

    hidden_size:     size of one embedding
    pixel_shape:     shape of pixel_values, with None for a size that may vary; None if the shape is not known
    num_embeds:      embeddings of each image; None if it depends on the image
    grid_merge_size: rows, and columns, of patches that make one embedding; None for a model without grids
    """

    hidden_size: int
    pixel_shape: tuple[int | None, ...] | None = None
    num_embeds: int | None = None
    grid_merge_size: int | None = None


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The facts of a model that limit requests.

    num_kv_heads: of all ranks together, of each group of layers
    prompt_embeds_size: size of one embedding in a prompt; 0 if prompts have none
    embedding_size: size of one embedding in the output; 0 if the model gives none
    images: None if the model takes no images
    """

    vocab_size: int
    num_kv_heads: tuple[int, ...]
    prompt_embeds_size: int = 0
    embedding_size: int = 0
    images: ImageFacts | None = None


def find_request_mistake(request: EngineCoreRequest, limits: RequestLimits) -> str | None:
    """Say why this engine's model cannot take a request, or return None."""
    embeds, pooling = request.prompt_embeds, request.pooling_params
    if pooling is not None and pooling.dimensions is not None and pooling.dimensions > max(1, limits.embedding_size):
        return f"dimensions is {pooling.dimensions}, the model's embeddings have {limits.embedding_size}"
    return (
        find_token_mistake("prompt_token_ids", request.prompt_token_ids, limits.vocab_size)
        or find_token_mistake("output_token_ids", request.output_token_ids, limits.vocab_size)
        or _find_sampling_mistake(request.sampling_params, limits.vocab_size)
        or (None if embeds is None else _find_embeds_mistake(embeds, limits.prompt_embeds_size))
        or _find_ticket_mistake(request.kv_transfer_params)
        or _find_peer_mistake(request, limits.num_kv_heads)
        or _find_images_mistake(request, limits.images)
    )


def _find_ticket_mistake(ticket: KVTransferParams | None) -> str | None:
    """Name a transfer id that is a part's, or has a zero character, by which a line of a log might be cut."""
    if ticket is None:
        return None
    if not isinstance(ticket.transfer_id, str):
        return "the transfer_id names a part of a transfer, which only an engine's ranks do"
    return "the transfer_id has a zero character" if "\0" in ticket.transfer_id else None


def find_token_mistake(field: str, token_ids: Iterable[int], vocab_size: int) -> str | None:
    """Name the token that the model does not know, or return None."""
    tokens = token_ids if isinstance(token_ids, list | tuple) else list(token_ids)
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size):
        return None
    unknown = next(token_id for token_id in tokens if not 0 <= token_id < vocab_size)
    return f"{field} has token {unknown}, the model's are 0 to {vocab_size - 1}"


def _find_sampling_mistake(params: SamplingParams, vocab_size: int) -> str | None:
    for field, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            return f"{field} is {count}, the model has {vocab_size} tokens"
    for field, token_ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", tuple(params.logit_bias)),
        ("allowed_token_ids", params.allowed_token_ids),
        ("bad_words", tuple(token_id for word in params.bad_words for token_id in word)),
    ):
        if (mistake := find_token_mistake(field, token_ids, vocab_size)) is not None:
            return mistake
    return None


def _find_embeds_mistake(embeds: PromptEmbeds, hidden_size: int) -> str | None:
    if embeds.hidden_size != hidden_size:
        return f"prompt_embeds has rows of {embeds.hidden_size} numbers, the model's embeddings have {hidden_size}"
    shape = (embeds.num_tokens, embeds.hidden_size)
    return _find_array_mistake("prompt_embeds", (embeds.dtype, shape, len(embeds.data)), _FLOAT_SIZES)


def _find_peer_mistake(request: EngineCoreRequest, num_kv_heads: tuple[int, ...]) -> str | None:
    ticket, source = request.kv_transfer_params, request.prefix_source
    peers = (
        None if ticket is None else ticket.peer,
        None if source is None else source.peer,
        request.encoder,
    )
    for peer in peers:
        if peer is not None and (mistake := find_peer_mistake(peer, num_kv_heads)) is not None:
            return mistake
    return None


def find_peer_mistake(peer: EngineAddress, num_kv_heads: tuple[int, ...]) -> str | None:
    """Say why this model's heads cannot be shared by the ranks of such a peer, or return None."""
    try:
        for num_heads in num_kv_heads:
            rank_kv_heads(num_heads, peer.tp_size, 0)
    except ValueError as error:
        return f"engine {peer.engine_id} cannot be a peer: {error}"
    return None


# -- images ----------------------------------------------------------------------------------------------------------


def _find_images_mistake(request: EngineCoreRequest, facts: ImageFacts | None) -> str | None:
    features = {feature.mm_hash: feature for feature in request.mm_features}
    if facts is None:
        # The scheduler refuses features for such a model. This function refuses images that no feature refers to.
        return "the model takes no images" if request.encoder_inputs else None
    for feature in request.mm_features:
        if feature != features[feature.mm_hash] and _size_of(feature) != _size_of(features[feature.mm_hash]):
            return "two items of the prompt give one image different sizes"
        if feature.length != feature.num_embeds:
            return (
                f"an image has {feature.num_embeds} embeddings and {feature.length} tokens; the numbers must be equal"
            )
        if (facts.grid_merge_size is None) != (feature.grid is None):
            return f"an image has the grid {feature.grid}, the model's have {'none' if feature.grid else 'one'}"
    for image in request.encoder_inputs:
        if (shown := features.pop(image.mm_hash, None)) is None:
            return "an image to encode is not one of the prompt's, or is there twice"
        if (mistake := find_image_mistake(image, facts, shown)) is not None:
            return mistake
    if features and request.encoder_inputs:
        return "some of the prompt's images are not among those to encode"
    return None


def _size_of(feature: MultiModalFeature) -> tuple[object, ...]:
    return feature.length, feature.num_embeds, feature.grid


def find_image_mistake(image: EncoderInput, facts: ImageFacts, feature: MultiModalFeature | None = None) -> str | None:
    """Say why an encoder cannot be given this, or would make something else of it than the prompt says."""
    for name, array in image.arrays.items():
        described = (array.dtype, array.shape, len(array.data))
        if (mistake := _find_array_mistake(name, described, _ARRAY_SIZES)) is not None:
            return mistake
        if name == EMBEDDINGS:
            wanted = None if feature is None else feature.num_embeds
            return find_embeddings_mistake(described, facts, wanted)
    return _find_pixels_mistake(image.arrays, facts, feature)


def find_embeddings_mistake(described: DescribedArray, facts: ImageFacts, num_embeds: int | None) -> str | None:
    """Say why these are no embeddings of an image of this model, or return None. num_embeds: if that is known."""
    _, shape, _ = described
    if len(shape) != 2 or shape[0] < 1 or shape[1] != facts.hidden_size:
        return f"embeddings have the shape {shape}, the model's have {facts.hidden_size} numbers each"
    if num_embeds is not None and shape[0] != num_embeds:
        return f"an image of {num_embeds} embeddings is given {shape[0]}"
    return _find_array_mistake(EMBEDDINGS, described, _FLOAT_SIZES)


def _find_pixels_mistake(
    arrays: Mapping[str, PackedArray], facts: ImageFacts, feature: MultiModalFeature | None
) -> str | None:
    if facts.pixel_shape is None:
        return None
    names = {_PIXELS} if facts.grid_merge_size is None else {_PIXELS, _GRID}
    if arrays.keys() != names:
        return f"an image has the arrays {sorted(arrays)}, the model takes {sorted(names)}"
    pixels = arrays[_PIXELS]
    is_shaped = len(pixels.shape) == len(facts.pixel_shape) and all(
        size > 0 and expected in (None, size) for size, expected in zip(pixels.shape, facts.pixel_shape, strict=True)
    )
    if not is_shaped or pixels.dtype != "float32":
        return f"pixel_values is {pixels.dtype} {pixels.shape}, the model takes float32 {facts.pixel_shape}"
    if facts.grid_merge_size is not None:
        return _find_grid_mistake(arrays, facts.grid_merge_size, feature)
    if feature is not None and facts.num_embeds not in (None, feature.num_embeds):
        return f"an image has {feature.num_embeds} embeddings, the model makes {facts.num_embeds}"
    return None


def _find_grid_mistake(
    arrays: Mapping[str, PackedArray], merge_size: int, feature: MultiModalFeature | None
) -> str | None:
    array, num_patches = arrays[_GRID], arrays[_PIXELS].shape[0]
    if array.dtype != "int64" or array.shape != (1, 3):
        return f"an image's grid is {array.dtype} {array.shape}, the model takes int64 (1, 3)"
    frames, rows, columns = (int(size) for size in np.frombuffer(array.data, dtype="<i8"))
    sizes = (frames, rows, columns)
    if min(sizes) < 1 or math.prod(sizes) != num_patches or rows % merge_size or columns % merge_size:
        return f"an image has {num_patches} patches, which are not its grid {sizes} in squares of {merge_size}"
    merged = (frames, rows // merge_size, columns // merge_size)
    if feature is not None and (feature.grid != merged or feature.num_embeds != math.prod(merged)):
        return (
            f"the prompt gives an image the grid {feature.grid} and {feature.num_embeds} embeddings, but its arrays "
            f"have the grid {merged}"
        )
    return None


def _find_array_mistake(name: str, described: DescribedArray, sizes: Mapping[str, int]) -> str | None:
    dtype, shape, size_bytes = described
    if (item_size_bytes := sizes.get(dtype)) is None:
        return f"{name} has the dtype {dtype!r}, allowed are {', '.join(sizes)}"
    expected = math.prod(shape) * item_size_bytes
    return None if size_bytes == expected else f"{name} of {dtype} {shape} has {size_bytes} bytes, not {expected}"
