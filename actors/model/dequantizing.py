"""Checkpoints whose weights are quantized: what transformers' loader is told of them, and what is done afterwards.

transformers reads all of them, with the package of each method. Weights that it computes with only on a GPU, in kernels
that it downloads, become plain ones while they are read: block FP8, MXFP4, and compressed-tensors whose layers round
their weights only. What rounds its inputs, too (compressed-tensors' W8A8, torchao, bitsandbytes), computes as in
transformers, with the package's own layers.
"""

from __future__ import annotations

import copy
import logging
from typing import Any, Final

import torch
from transformers import PretrainedConfig, PreTrainedModel

from actors.model.config.config_rules import architecture_name, quantization_method, quantization_settings
from actors.model.errors import UnsupportedModel

logger = logging.getLogger(__name__)

_COMPRESSED_TENSORS: Final = "compressed-tensors"
_TORCHAO: Final = "torchao"
_ALWAYS_PLAIN: Final = {"fp8": "FP8", "mxfp8": "MXFP8", "mxfp4": "MXFP4"}
"""The methods whose weights become plain on every device, with the names that the log gives them."""


def with_plain_weights(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config with which transformers' loader dequantizes a checkpoint, and log a line that says so.

    The same config is returned if the weights are not quantized, or are not dequantized by the loader.
    Raises ImportError if the method's package is not installed.
    """
    method, settings = quantization_method(config), quantization_settings(config)
    if method not in (*_ALWAYS_PLAIN, _COMPRESSED_TENSORS):
        return config
    name = _ALWAYS_PLAIN.get(method) or f"{method} ({settings.get('format')})"
    if method == _COMPRESSED_TENSORS and _rounds_inputs(settings):
        logger.warning(
            "the checkpoint's weights are dequantized once they are read, and its layers round their inputs as the "
            "format says, with torch's own operations: on no device does it compute with 8-bit numbers",
            extra={"quantization": name},
        )
        return config
    logger.warning(
        "the checkpoint's weights are dequantized while they are read, to the size of plain ones",
        extra={"quantization": name},
    )
    config = copy.deepcopy(config)
    owner = config if getattr(config, "quantization_config", None) else config.get_text_config(decoder=True)
    owner.quantization_config = settings | {"dequantize": True}
    return config


def refuse_other_dtype(config: PretrainedConfig, wanted: torch.dtype | None) -> None:
    """Raise UnsupportedModel if the package's layers compute in one dtype only, and another one is configured.

    wanted: of the configuration; None leaves the choice to the checkpoint
    """
    written = getattr(config.get_text_config(decoder=True), "dtype", None) or getattr(config, "dtype", None)
    if quantization_method(config) != _TORCHAO or None in (wanted, written) or wanted == written:
        return
    raise UnsupportedModel(
        architecture_name(config),
        f"torchao's layers compute in {_name_of(written)}, in which the checkpoint was written, and model.dtype is "
        f"{_name_of(wanted)}: set model.dtype to auto",
    )


@torch.no_grad()
def finish_loading(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Dequantize what transformers would dequantize in the first forward, which might be another module's.

    dtype: that the weights without a scale get in a model that was dequantized while it was read, since transformers
        leaves these in the file's dtype
    """
    if is_quantized(model):
        compressor = getattr(model.hf_quantizer, "compressor", None)
        if compressor is not None:
            compressor.decompress_model(model)
        return
    in_float32 = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not any(part in name for part in in_float32):
            weight.data = weight.data.to(dtype)


def is_quantized(model: PreTrainedModel) -> bool:
    """Whether layers of a loaded model are quantized: they may round inputs, which makes a tiny difference a step."""
    return getattr(model, "hf_quantizer", None) is not None


def _rounds_inputs(settings: dict[str, Any]) -> bool:
    groups = settings.get("config_groups", {}).values()
    return any(group.get("input_activations") or group.get("output_activations") for group in groups)


def _name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
