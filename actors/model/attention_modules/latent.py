"""Lets transformers' latent attention (MLA) hand its latents to the paged KV cache.

The modules of all families of this kind (class_facts.WITH_LATENT_ATTENTION) have a method expand_kv(), which makes the
keys and values of every head of a token's latent and rotary key, behind the point where transformers would cache these.
That method is all that is replaced: where the model attends with our attention it returns the latent and the rotary key
as the key of one head, and a value without numbers, by which attention_forward() knows them. Queries, rotary positions,
scaling and the output layer are transformers' own in every family.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.model.attention.batch_attention import ATTENTION_NAME
from actors.model.config.class_facts import WITH_LATENT_ATTENTION

_EXPANDING_LAYER: Final = "kv_b_proj"


def keep_latents(model: PreTrainedModel) -> None:
    """Replace expand_kv() in the attention modules of a model with latent attention; leave other models alone."""
    if model.config.get_text_config(decoder=True).model_type not in WITH_LATENT_ATTENTION:
        return
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            _replace(module)


def is_absorbed(model: PreTrainedModel, layer_name: str) -> bool:
    """Whether a linear layer's product is never computed by itself, because attention absorbs its weight.

    An adapter that changes such a layer would have no effect.
    """
    parent, _, attribute = layer_name.rpartition(".")
    return attribute == _EXPANDING_LAYER and hasattr(model.get_submodule(parent), "expand_kv")


def _replace(module: Any) -> None:  # an attention module of transformers, whose attributes are untyped
    own = module.expand_kv

    def expand_kv(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """latent: [1, 1, num_tokens, kv_lora_rank]; rotary: [1, 1, num_tokens, qk_rope_head_dim]"""
        if module.config._attn_implementation != ATTENTION_NAME:
            expanded: tuple[Tensor, Tensor] = own(latent, rotary)
            return expanded
        return torch.cat([latent, rotary], dim=-1), latent[..., :0]

    module.expand_kv = expand_kv
