"""Seeded LoRA adapters, made by PEFT, and PEFT's own answers with them: merged into the model, then generate()."""

from __future__ import annotations

import functools
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from actors.checkpoint.adapter_files import describe_adapter
from actors.core.requests.adapter import Adapter
from actors.lora_config import LoraConfig
from tests.reference import greedy_tokens

EVERY_LINEAR_LAYER = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@contextmanager
def _quiet() -> Iterator[None]:
    """PEFT asks transformers in ways that these warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make_adapter(checkpoint: Path, directory: Path, *, seed: int = 0, **settings: Any) -> Path:
    """An adapter whose effect is large: both of its matrices are drawn, at a size that changes most tokens."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": EVERY_LINEAR_LAYER, "task_type": "CAUSAL_LM"}
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        adapted = get_peft_model(model, PeftLoraConfig(**(options | settings)))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.data.normal_(0, 0.2, generator=generator)
        adapted.save_pretrained(str(directory))
    return directory


def adapter_of(directory: Path, name: str | None = None) -> Adapter:
    """Return the adapter that an ingress makes of a directory."""
    limits = LoraConfig(allowed_directories=(str(directory),), max_lora_rank=1024)
    return describe_adapter(name or directory.name, str(directory), limits)


@functools.cache
def merged_checkpoint(checkpoint: Path, adapter: Path) -> Path:
    """The checkpoint of the model into which PEFT has merged the adapter."""
    from peft import PeftModel

    directory = adapter.with_name(f"{adapter.name}-merged")
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(str(directory))
    for file in checkpoint.glob("*token*"):
        shutil.copy(file, directory)
    return directory


def adapted_tokens(checkpoint: Path, adapter: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the tokens of generate() with the adapter merged."""
    return greedy_tokens(merged_checkpoint(checkpoint, adapter), tuple(prompt), num_tokens)
