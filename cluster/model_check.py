"""What the files of a checkpoint, and of adapters, say at the door, before any engine has to die of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.adapter_files import check_adapter
from actors.lora_config import LoraConfig
from actors.peft_config import AdapterRefused
from kv_transfer.layout import rank_kv_heads


def find_model_mistakes(directory: Path, tensor_parallel_sizes: Mapping[str, int]) -> list[str]:
    """Why this model cannot be served as it is configured; empty if nothing speaks against it so far.

    tensor_parallel_sizes: by the setting's name, such as "decode.parallel.tensor_parallel_size"
    """
    try:
        text = (directory / "config.json").read_text()
    except OSError:
        missing = "is not a checkpoint in Hugging Face format: there is no config.json in it"
        return [f"model.model: {str(directory)!r} {missing}"]
    try:
        config = json.loads(text)
    except ValueError as error:
        return [f"model.model: {str(directory / 'config.json')!r} is not JSON: {error}"]
    mistakes = ((name, _find_head_mistake(config, size)) for name, size in tensor_parallel_sizes.items())
    return [f"{name} = {tensor_parallel_sizes[name]}: {mistake}" for name, mistake in mistakes if mistake]


def find_adapter_mistakes(lora: LoraConfig | None) -> list[str]:
    """Why configured LoRA adapters cannot be served; whether they fit the model is for the engines to say."""
    if lora is None:
        return []
    mistakes = []
    for name, directory in lora.adapters.items():
        try:
            check_adapter(directory, lora)
        except AdapterRefused as refused:
            mistakes.append(f"lora.adapters.{name}: {refused}")
    return mistakes


def _find_head_mistake(config: Any, tp_size: int) -> str | None:  # JSON
    """Why the model's heads cannot be shared by so many ranks; None also where config.json names none.

    The engines' own word (actors/model/tensor_parallel_plan.py) is the last one: it knows transformers' defaults.
    """
    text = config.get("text_config") or config
    num_heads = text.get("num_attention_heads") or text.get("n_head")
    if tp_size == 1 or not isinstance(num_heads, int):
        return None
    if num_heads % tp_size:
        return f"the model's {num_heads} attention heads cannot be shared evenly by {tp_size} ranks"
    try:
        rank_kv_heads(text.get("num_key_value_heads") or num_heads, tp_size, 0)
    except ValueError as error:
        return f"the model's {error}"
    return None
