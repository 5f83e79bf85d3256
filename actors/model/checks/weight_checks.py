"""Checks a checkpoint's weights: none is missing or left unread, their shapes are the model's, and all are finite."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from actors.model.config.model_kind import ModelKind, kind_of
from actors.model.errors import CheckpointError

logger = logging.getLogger(__name__)

_MAX_NAMES: Final = 8
_NO_WEIGHTS: Final = re.compile(
    # Masks and rotary frequencies, which older versions of transformers saved and newer ones compute; and scales for
    # 8-bit KV caches, which raypd does not have.
    r"(^|\.)(attn|attention)\.(bias|masked_bias)$|rotary_emb\.inv_freq$|(^|\.)position_ids$|\.[kv]_scale$"
)
_LEFTOVERS: Final = re.compile(
    # Heads for other uses of a model, such as a reward model's; layers for multi-token prediction (MTP); encoders of
    # images and sound. A model that was built without such a layer computes its logits without these weights.
    r"^(score|v_head|classifier|qa_outputs|cls|pooler)\.|(^|\.)mtp\w*\."
    r"|(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|mm_projector|embed_vision"
    r"|audio_tower|embed_audio|speech_encoder)\."
)
_HEADS: Final = re.compile(r"^(cls|lm_head|classifier|pooler|score|predictions|generator_lm_head|qa_outputs)\.")
"""Layers that come after the hidden states. A model that is loaded without such layers does not need their weights."""


def refuse_report(directory: Path, report: Mapping[str, Iterable[object]], config: PretrainedConfig) -> None:
    """Raise CheckpointError for faults that transformers' loader accepts: it gives missing weights random values.

    report: the loader's loading info; its unexpected_keys lack the names that the model's class declares as ignored
    """
    missing = sorted(map(str, report["missing_keys"]))
    if kind_of(config) is ModelKind.EMBEDDING:
        # Encoders have a pooler layer after their hidden states. raypd does not use it, and many checkpoints lack it.
        missing = [name for name in missing if not name.startswith("pooler.")]
    if missing:
        raise CheckpointError(f"model: {directory} lacks weights: {list_names(missing)}")
    mismatched = sorted(_describe_shapes(key) for key in report["mismatched_keys"])
    if mismatched:
        raise CheckpointError(
            f"model: weights in {directory} do not have the shapes of config.json: {list_names(mismatched)}"
        )
    refuse_unread(directory, map(str, report["unexpected_keys"]), config)


def refuse_unread(directory: Path, names: Iterable[str], config: PretrainedConfig) -> None:
    """Raise CheckpointError if the checkpoint has weights that the model has not read and may need.

    names: the weights that were not read, without those that the model's class declares as ignored
    """
    left = sorted(name for name in names if not _NO_WEIGHTS.search(name))
    known = [name for name in left if _is_leftover(name, config)]
    if known:
        logger.info("the checkpoint has weights that are not needed here", extra={"weights": list_names(known)})
    unread = [name for name in left if name not in set(known)]
    if unread:
        raise CheckpointError(
            f"model: {directory} has weights that this model does not read, so config.json is another model's, or "
            f"does not say how the weights are quantized or packed: {list_names(unread)}. No setting allows them: "
            "serve a checkpoint whose config.json describes these weights, or one without them"
        )


def _is_leftover(name: str, config: PretrainedConfig) -> bool:
    """Whether checkpoints of such models are known to hold this weight, which the decoder does not need."""
    if _LEFTOVERS.search(name) or (not kind_of(config).generates and _HEADS.search(name)):
        return True
    text = config.get_text_config(decoder=True)
    # DeepSeek and similar models number their layers for multi-token prediction after the decoder's layers.
    num_further = getattr(text, "num_nextn_predict_layers", None) or 0
    layer = re.match(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.", name)
    return layer is not None and 0 <= int(layer[1]) - text.num_hidden_layers < num_further


def ignored_patterns(model: PreTrainedModel) -> re.Pattern[str] | None:
    """Return a pattern of the weights that the model's class declares as ignored; None if it declares none."""
    patterns = sorted(model._keys_to_ignore_on_load_unexpected or ())
    return re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None


@torch.inference_mode()
def refuse_nan(directory: Path, model: nn.Module) -> None:
    """Raise CheckpointError if a weight holds NaN or an infinite number. Reads every weight once."""
    for name, weight in model.named_parameters():
        if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.dtype.itemsize < 2:
            # Not every device can sum 8-bit numbers, nor can every class of quantized weights. The scales that belong
            # to such weights are checked instead, or else the logits.
            continue
        if bool(torch.isfinite(weight.sum(dtype=torch.float32))):
            continue
        if bool(torch.isnan(weight).any()):
            raise CheckpointError(f"model: {name} in {directory} has NaN; download the checkpoint again")
        if bool(torch.isinf(weight).any()):
            raise CheckpointError(f"model: {name} in {directory} has infinite numbers; download the checkpoint again")


def list_names(names: Iterable[str]) -> str:
    """Join the first eight names, and append how many more there are."""
    names = list(names)
    more = f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _describe_shapes(key: object) -> str:
    """Describe a mismatch that transformers reports as key: (name, shape in the checkpoint, shape in the model)."""
    assert isinstance(key, tuple), "transformers reports both shapes"
    name, found, expected = key
    return f"{name} is {list(found)} instead of {list(expected)}"
