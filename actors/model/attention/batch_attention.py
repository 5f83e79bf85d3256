"""The interface between transformers' models and our KV cache.

transformers lets a model's attention be replaced by a function that is registered by name. Ours finds the step's batch
in its keyword arguments, since models hand unknown arguments of their forward down to it. So there is no global state,
and no model's code is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from actors.model.errors import UnsupportedModel

ATTENTION_NAME = "raypd"
BATCH_ARGUMENT = "raypd_batch"

# Arguments by which models ask for attention that no backend of ours computes.
_UNSUPPORTED_ARGUMENTS = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias (ALiBi or relative positions)",
    "alibi": "ALiBi",
    "head_mask": "a head mask",
    "indices": "sparse attention",
}


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The attention that one layer asks for.

    index:          the layer of the KV cache that it reads and writes
    scaling:        the scores' factor
    softcap:        scores become softcap * tanh(score / softcap), if set
    sliding_window: a token sees this many tokens, itself included, if set
    is_causal:      a token sees those before it and itself; if not, all of its request, which then is in one step
    """

    index: int
    scaling: float
    softcap: float | None
    sliding_window: int | None
    is_causal: bool = True


@dataclass(frozen=True, slots=True)
class BatchShape:
    """One step's requests, flattened: request i owns tokens query_starts[i] to query_starts[i + 1].

    query_starts: [num_requests + 1] int64
    num_computed: [num_requests] int64, tokens whose KV is in the cache before this step
    block_tables: [num_requests, max_blocks] int64, each row's blocks in order; what follows a request's last is unread
    num_common_blocks: how many blocks at the start of each table are the same for all requests, and filled
    """

    query_starts: np.ndarray
    num_computed: np.ndarray
    block_tables: np.ndarray
    num_common_blocks: int = 0

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

    Implemented by the torch backend and by the probe that records a model's geometry; GPU kernels come later.
    """

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store this step's keys and values, then attend over each request's own tokens.

        query: [num_heads, num_tokens, head_dim]; key, value: [num_kv_heads, num_tokens, head_dim]
        Returns [num_tokens, num_heads, head_dim].
        """


def register_attention() -> None:
    """Make ATTENTION_NAME known to transformers. No mask is registered for it, so models build none."""
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
    **kwargs: object,
) -> tuple[Tensor, None]:
    """transformers' calling convention: [1, heads, tokens, head_dim] in, [1, tokens, heads, head_dim] out.

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
    )
    return batch.attend(layer, query[0], key[0], value[0])[None], None


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
