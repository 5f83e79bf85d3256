"""Checkpoints whose quantized weights are turned into plain ones while they are read."""

from __future__ import annotations

import logging
from typing import Final

from transformers import PretrainedConfig
from transformers.utils.quantization_config import Mxfp4Config

from actors.model.config.config_rules import quantization_method

logger = logging.getLogger(__name__)

_MXFP4: Final = "mxfp4"


def dequantizing_arguments(config: PretrainedConfig) -> dict[str, Mxfp4Config]:
    """Return what transformers' loader needs to be told to return plain weights; log a line if it dequantizes.

    MXFP4 (gpt-oss) is dequantized on every device: transformers computes with it in kernels that it downloads.
    """
    if quantization_method(config) != _MXFP4:
        return {}
    logger.warning(
        "the checkpoint's MXFP4 weights are dequantized while they are read, to nearly four times their size in 16 bits"
    )
    return {"quantization_config": Mxfp4Config(dequantize=True)}
