"""Finds out from its checkpoint whether a model takes images."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoConfig

from actors.model.multimodal.families import SERVED_FAMILIES, image_token_id
from cluster.errors import TokenizerUnusable
from cluster.images.prompt_images import PromptImages
from cluster.settings.images import ImageConfig


def open_prompt_images(directory: Path, config: ImageConfig) -> PromptImages | None:
    """Return the object that puts images into prompts; None if the model takes no images. This starts no process.

    Raises TokenizerUnusable if the checkpoint's config cannot be read.
    """
    file = directory / "config.json"
    if not file.is_file() or json.loads(file.read_text()).get("model_type") not in SERVED_FAMILIES:
        return None
    try:
        model_config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise TokenizerUnusable(f"{file} cannot be read: {error}") from error
    return PromptImages(directory, image_token_id(model_config), config)
