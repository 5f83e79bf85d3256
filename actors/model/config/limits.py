"""How long a sequence of a model may be."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PretrainedConfig

from actors.model.config.config_rules import architecture_name
from actors.model.errors import UnsupportedModel


def derive_max_model_len(config: PretrainedConfig, wanted: int | None, first_position: int = 0) -> int:
    """Return the longest sequence in tokens, prompt plus output: wanted, or the model's own limit if wanted is None.

    first_position: the position that the model gives a sequence's first token; lower positions are not used
    LongRoPE rotates every token of a batch by the frequencies of the longest sequence in it. Served beyond its original
    length, a request's tokens would depend on other requests of the batch: longer sequences are refused.
    Raises UnsupportedModel if wanted exceeds the limit, if the config has no limit and wanted is None, or if wanted is
    None and a LongRoPE model's own limit is beyond its original length.
    """
    text = config.get_text_config(decoder=True)
    positions: int | None = getattr(text, "max_position_embeddings", None)
    if positions is not None:
        positions -= first_position
    originals = list(_longrope_lengths(text))
    limit = min([*originals, *([positions] if positions else [])], default=None)
    if limit is None:
        if wanted is None:
            raise UnsupportedModel(
                architecture_name(config), "its config has no max_position_embeddings; give model.max_model_len"
            )
        return wanted
    if originals and (wanted or positions or 0) > limit:
        raise UnsupportedModel(
            architecture_name(config),
            f"its rotary embedding (LongRoPE) has other factors beyond {limit} tokens, by which transformers computes "
            f"all of a sequence again, and they are not served: set model.max_model_len to {limit} or less",
        )
    if wanted is not None and wanted > limit:
        raise UnsupportedModel(
            architecture_name(config),
            f"model.max_model_len is {wanted}, but at most {limit} is possible: its positions end there",
        )
    return wanted or limit


def _longrope_lengths(text: PretrainedConfig) -> Iterator[int]:
    parameters = getattr(text, "rope_parameters", None) or {}
    by_layer_type = list(parameters.values()) if "rope_type" not in parameters else [parameters]
    for rope in by_layer_type:
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            yield int(rope["original_max_position_embeddings"])
