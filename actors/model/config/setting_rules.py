"""Finds reasons in a checkpoint's config.json alone not to serve the model with some settings of its engines.

config_rules.py has the reasons not to serve it at all, and those against several ranks and drafts. Nothing here needs
torch.
"""

from __future__ import annotations

from typing import Final

from transformers import PretrainedConfig

from actors.model.config.config_rules import count_layer_heads, count_layers, has_latents, keeps_served_states

NO_STORES_WITH_STATES: Final = (
    "it keeps recurrent states, without which a stored prefix is of no use; such a model is served without KV stores "
    "(unset kv_transfer.cpu_cache_gib and kv_transfer.stores)"
)
_WHOLE_BLOCKS: Final = "so its blocks travel whole; give all engines the same block size"


def reason_against_stores(config: PretrainedConfig) -> str | None:
    """Return why blocks of a model's KV cannot be kept in stores, host memory included; None if they can."""
    return NO_STORES_WITH_STATES if keeps_served_states(config) else None


def reason_against_block_sizes(config: PretrainedConfig) -> str | None:
    """Return why engines with blocks of different sizes cannot exchange a model's KV; None if its config names nothing.

    Once the models are loaded, find_mismatch() of kv_transfer/links/link_compatibility.py decides.
    """
    text = config.get_text_config(decoder=True)
    if keeps_served_states(config):
        return f"it keeps recurrent states, {_WHOLE_BLOCKS}"
    if has_latents(text):
        return f"its latent attention (MLA) keeps no values, {_WHOLE_BLOCKS}"
    shapes = {_kv_shape(text, layer) for layer in range(count_layers(text))}
    if len(shapes) > 1 or any(key_size != value_size for _, key_size, value_size in shapes):
        return f"its keys and values, or its layers, differ in their shape, {_WHOLE_BLOCKS}"
    return None


def _kv_shape(text: PretrainedConfig, layer: int) -> tuple[int, int, int]:
    """Return the KV heads of a layer and the widths of their keys and values; a width of 0 is not in the config."""
    own = text.per_layer_config[layer] if getattr(text, "is_heterogeneous", False) else text
    key_size = int(getattr(own, "head_dim", None) or 0)
    return count_layer_heads(text, layer)[1], key_size, int(getattr(own, "v_head_dim", None) or key_size)
