"""The interface between transformers' models and our KV cache.

transformers lets a model's attention be replaced by a function that is registered by name. Our function finds the
step's batch in its keyword arguments, since a model hands unknown arguments of its forward down to the attention
function. So there is no global state, and no model's code is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from actors.model.attention.latent_heads import LatentHeads
from actors.model.errors import UnsupportedModel

ATTENTION_NAME = "raypd"
BATCH_ARGUMENT = "raypd_batch"

# Arguments by which models ask for attention that no backend of ours computes.
_UNSUPPORTED_ARGUMENTS = {
    "sinks": "attention sinks under another name than s_aux",
    "position_bias": "a position bias (ALiBi or relative positions)",
    "alibi": "ALiBi",
    "head_mask": "a head mask",
    "indices": "sparse attention",
}


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The attention that one layer asks for.

    index:          the layer's index in the model; KVGeometry.plane_of() tells where its KV is
    scaling:        the factor by which the products of queries and keys are multiplied
    softcap:        if set, scores become softcap * tanh(score / softcap)
    sliding_window: if set, a token attends to the last sliding_window tokens only, itself included
    is_causal:      True: a token attends to itself and to the tokens before it. False: a token attends to all tokens of
        its request, so the whole request has to be computed in one step
    has_sinks:      whether each head has a sink: a learned score that takes part in the softmax and has no value, so
        that a token's weights add up to less than 1
    value_size:     if set, values are the first value_size numbers of keys, and none are stored (latent attention)
    chunk_size:     if set, a token attends only to tokens of its chunk: those with the same position // chunk_size
    """

    index: int
    scaling: float
    softcap: float | None
    sliding_window: int | None
    is_causal: bool = True
    has_sinks: bool = False
    value_size: int | None = None
    chunk_size: int | None = None

    @property
    def reach(self) -> Reach:
        """Return which earlier tokens a token of this layer attends to."""
        return Reach(self.sliding_window, self.chunk_size)


@dataclass(frozen=True, slots=True)
class Reach:
    """The earlier tokens that a token attends to; AttentionLayer says what the numbers mean."""

    sliding_window: int | None = None
    chunk_size: int | None = None


@dataclass(frozen=True, slots=True)
class BatchShape:
    """One step's requests, flattened: request i owns tokens query_starts[i] to query_starts[i + 1].

    query_starts: [num_requests + 1] int64
    num_computed: [num_requests] int64, tokens whose KV is in the cache before this step
    block_tables: [num_requests, max_blocks] int64, each request's blocks in order; entries after a request's last block
        are not read
    num_common_blocks: how many blocks at the start of each row of block_tables are the same for all requests, and full
    state_blocks: [num_requests, blocks of a slot] int64, each request's recurrent state; None for a model without
    """

    query_starts: np.ndarray
    num_computed: np.ndarray
    block_tables: np.ndarray
    num_common_blocks: int = 0
    state_blocks: np.ndarray | None = None

    @property
    def query_lens(self) -> np.ndarray:
        """[num_requests]: tokens that each request computes in this step; at least 1."""
        return np.diff(self.query_starts)

    @property
    def seq_lens(self) -> np.ndarray:
        """[num_requests]: tokens whose KV is in the cache after this step."""
        seq_lens: np.ndarray = self.num_computed + self.query_lens
        return seq_lens


class BatchAttention(Protocol):
    """One step's batch, prepared once and then used by every layer.

    The batches of the backends (backend.py) implement this interface, and so does GeometryProbe, which records a
    model's geometry.
    """

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Store this step's keys and values, then attend over each request's own tokens.

        query: [num_heads, num_tokens, key_size]
        key:   [num_kv_heads, num_tokens, key_size]; value: [num_kv_heads, num_tokens, value_size]. A layer that reads
            another layer's KV is given that layer's, which is not stored again
        sinks: [num_heads], the score of each head's sink; None if the layer has none
        Returns [num_tokens, num_heads, value_size].
        """


@runtime_checkable
class LatentAttention(Protocol):
    """A step's batch that expands latents where this takes fewer operations. Any other batch attends absorbed."""

    def attend_latent(self, layer: AttentionLayer, query: Tensor, latent: Tensor, heads: LatentHeads) -> Tensor:
        """Store this step's latents, then attend over each request's own tokens.

        query:  [num_heads, num_tokens, key_size + rotary size]
        latent: [1, num_tokens, rank + rotary size], each token's latent and rotary key
        Returns [num_tokens, num_heads, value_size].
        """


def register_attention() -> None:
    """Register attention_forward with transformers under ATTENTION_NAME.

    No mask function is registered under this name, so models build no mask.
    """
    AttentionInterface.register(ATTENTION_NAME, attention_forward)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend with the step's batch; transformers' attention modules call this function.

    query, key, value: as BatchAttention.attend() takes them, with a first dimension of 1. A value without numbers,
        [1, 1, num_tokens, 0], stands for latent attention; keys are latents then
    s_aux: [num_heads], the score of each head's sink, by the name that transformers gives it
    kwargs: BATCH_ARGUMENT names the step's BatchAttention
    Returns [1, num_tokens, num_heads, value_size], and None in place of the attention weights.
    Raises UnsupportedModel if the module asks for anything but plain attention, causal or to both sides.
    """
    _refuse_what_is_not_plain_attention(module, attention_mask, dropout, kwargs)
    batch: BatchAttention = kwargs[BATCH_ARGUMENT]  # type: ignore[assignment]  # model_runner put it there
    layer = AttentionLayer(
        index=module.layer_idx,  # type: ignore[arg-type]  # nn.Module's attributes are untyped; checked below
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=softcap,
        sliding_window=sliding_window,
        is_causal=bool(getattr(module, "is_causal", True)) and kwargs.get("is_causal") is not False,
        has_sinks=s_aux is not None,
        chunk_size=_chunk_size(module),
    )
    if not value.shape[-1]:
        return _attend_latent(batch, layer, query[0], key[0], LatentHeads.of(module))[None], None
    return batch.attend(layer, query[0], key[0], value[0], s_aux)[None], None


def _chunk_size(module: torch.nn.Module) -> int | None:
    """Return the chunk of a layer that attends within chunks. transformers puts it into the mask, and none is built."""
    config = getattr(module, "config", None)
    chunk_size: int | None = getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    if chunk_size is None or not kinds or kinds[module.layer_idx] != "chunked_attention":
        return None
    return chunk_size


def _attend_latent(
    batch: BatchAttention, layer: AttentionLayer, query: Tensor, latent: Tensor, heads: LatentHeads
) -> Tensor:
    """Attend as LatentAttention.attend_latent() does, with any batch."""
    layer = replace(layer, value_size=heads.rank)
    if isinstance(batch, LatentAttention):
        return batch.attend_latent(layer, query, latent, heads)
    return heads.project(batch.attend(layer, heads.absorb(query), latent, latent[..., : heads.rank]))


def _refuse_what_is_not_plain_attention(
    module: torch.nn.Module, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, object]
) -> None:
    name = type(module).__name__
    if BATCH_ARGUMENT not in kwargs:
        raise UnsupportedModel(name, "the model does not hand its keyword arguments down to attention")
    for argument, meaning in _UNSUPPORTED_ARGUMENTS.items():
        if kwargs.get(argument) is not None:
            raise UnsupportedModel(name, f"it uses {meaning}")
    if attention_mask is not None:
        raise UnsupportedModel(name, "it builds an attention mask of its own")
    if dropout:
        raise UnsupportedModel(name, "it applies dropout at inference")
    if not isinstance(getattr(module, "layer_idx", None), int):
        raise UnsupportedModel(name, "its attention layers do not know their index")
