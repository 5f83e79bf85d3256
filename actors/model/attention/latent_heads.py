"""Latent attention (MLA): attention whose keys and values are made of one latent vector and one rotary key of a token.

The KV cache holds the latent followed by the rotary key, as the key of one KV head, and no value. A head's key is a
matrix times the latent, followed by the rotary key; the head's value is another matrix times the latent. There are two
ways to compute the same attention (DeepSeek-V2, arXiv 2405.04434, section 2.1):

- *Expanded*: make every head's keys and values of the latents, then attend. A key has some hundred numbers, so this
  takes the fewest operations for the many tokens of a prompt.
- *Absorbed*: multiply the queries by the matrix of the keys, attend to the latents themselves, and multiply the result
  by the matrix of the values. Nothing is made for the tokens in the cache, so a decode step reads just the latents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.nn import functional

from actors.model.errors import UnsupportedModel

_MAX_EXPANDED: Final = 1 << 25
"""The most numbers of keys and values that are expanded at once: 128 MiB in float32. More heads take turns."""


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The matrices by which the heads of one layer, on one rank, read a latent vector.

    weight:   [num_heads, key_size + value_size, rank], the matrix of a head's key and then of its value
    key_size: numbers of a key before its rotary part
    """

    weight: Tensor
    key_size: int

    @classmethod
    def of(cls, module: Any) -> Self:  # an attention module of transformers, whose attributes are untyped
        """Read the matrices of a module, without a copy. Raises UnsupportedModel if they are not plain numbers."""
        layer, size = module.kv_b_proj, module.qk_nope_head_dim + module.v_head_dim
        weight: Any = getattr(layer, "weight", None)
        is_plain = isinstance(weight, Tensor) and weight.is_floating_point() and layer.bias is None
        if not is_plain or weight.shape[1:] != (module.kv_lora_rank,) or weight.shape[0] % size:
            raise UnsupportedModel(
                type(module).__name__, "kv_b_proj, which expands its latents, is quantized or has a bias"
            )
        return cls(weight.view(-1, size, module.kv_lora_rank), module.qk_nope_head_dim)

    @property
    def rank(self) -> int:
        """Numbers of a latent vector."""
        return self.weight.shape[2]

    @property
    def num_heads(self) -> int:
        """Heads of this rank."""
        return self.weight.shape[0]

    @property
    def value_size(self) -> int:
        """Numbers of a head's value."""
        return self.weight.shape[1] - self.key_size

    def absorb(self, query: Tensor) -> Tensor:
        """Turn queries for keys into queries for latents and rotary keys.

        query: [num_heads, n, key_size + rotary size]
        Returns [num_heads, n, rank + rotary size].
        """
        latent_part = query[..., : self.key_size] @ self.weight[:, : self.key_size]
        return torch.cat([latent_part, query[..., self.key_size :]], dim=-1)

    def project(self, attended: Tensor) -> Tensor:
        """Turn mixtures of latents into mixtures of values: [n, num_heads, rank] -> [n, num_heads, value_size]."""
        matrices = self.weight[:, self.key_size :].transpose(1, 2)
        return (attended.transpose(0, 1) @ matrices).transpose(0, 1)

    def expand(self, latents: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Make the keys and values of some heads, with zeros behind the shorter of the two.

        latents: [num_keys, rank + rotary size]
        Returns keys and values, both [heads, num_keys, the longer of key_size + rotary size and value_size]: fused
        attention takes keys and values of one size only.
        """
        rotary_size = latents.shape[1] - self.rank
        weight = self.weight[heads]
        made = functional.linear(latents[:, : self.rank], weight.flatten(0, 1))
        made = made.view(len(latents), len(weight), -1).transpose(0, 1)
        width = max(self.key_size + rotary_size, self.value_size)
        keys = made.new_zeros(len(weight), len(latents), width)
        keys[..., : self.key_size] = made[..., : self.key_size]
        keys[..., self.key_size : self.key_size + rotary_size] = latents[:, self.rank :]
        return keys, functional.pad(made[..., self.key_size :], (0, width - self.value_size))

    def expansion_pays(self, num_queries: int, num_keys: int) -> bool:
        """Whether a sequence's attention takes fewer multiplications expanded than absorbed.

        num_queries: the tokens that the step computes; num_keys: all tokens of the sequence so far
        The rotary part, which is the same either way, is left out.
        """
        size = self.weight.shape[1]
        expanded = num_keys * self.rank * size + num_queries * num_keys * size
        absorbed = num_queries * self.rank * size + num_queries * num_keys * 2 * self.rank
        return expanded < absorbed

    def parts(self, num_keys: int, width: int) -> Iterator[slice]:
        """Yield ranges of heads whose keys and values may be expanded at once. width: numbers of a key or value"""
        count = max(1, _MAX_EXPANDED // (2 * num_keys * width))
        for first in range(0, self.num_heads, count):
            yield slice(first, first + count)


def attend_sequence(query: Tensor, latents: Tensor, mask: Tensor | None, heads: LatentHeads, scaling: float) -> Tensor:
    """Attend with some tokens of one sequence to its latents, in the cheaper of the two ways.

    query:   [num_heads, q, key_size + rotary size]
    latents: [k, rank + rotary size], those of the last q tokens included
    mask:    [q, k], additive. None: q == k, and a token attends to itself and those before it
    scaling: the factor of the products of queries and keys
    Returns [q, num_heads, value_size].
    """
    if not heads.expansion_pays(query.shape[1], len(latents)):
        shared = latents.expand(heads.num_heads, -1, -1)
        attended = _attend(heads.absorb(query), shared, shared, mask, scaling)
        return heads.project(attended[..., : heads.rank].transpose(0, 1))
    output = query.new_empty(query.shape[1], heads.num_heads, heads.value_size)
    width = max(query.shape[2], heads.value_size)
    queries = functional.pad(query, (0, width - query.shape[2]))
    for part in heads.parts(len(latents), width):
        keys, values = heads.expand(latents, part)
        attended = _attend(queries[part], keys, values, mask, scaling)
        output[:, part] = attended[..., : heads.value_size].transpose(0, 1)
    return output


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attend with [heads, q, n] to keys and values, [heads, k, n]. Returns the query's shape."""
    return functional.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, is_causal=mask is None, scale=scaling
    )[0]
