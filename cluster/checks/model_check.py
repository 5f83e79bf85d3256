"""Checks of the files of a checkpoint and of adapters: mistakes are found before an engine has to fail of them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from actors.checkpoint.adapter_files import check_adapter
from actors.checkpoint.generation_defaults import InvalidGenerationConfig, read_generation_file
from actors.checkpoint.peft_config import AdapterRefused
from actors.config import ModelConfig
from actors.lora_config import LoraConfig
from cluster.checks.checkpoint_files import UnreadableCheckpoint, read_config_file, read_weights

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S: Final = 60.0


def find_model_mistakes(
    model: ModelConfig, tensor_parallel_sizes: Mapping[str, int], draft_models: Mapping[str, str] | None = None
) -> list[str]:
    """Why this model cannot be served as it is configured; empty if its files do not speak against it.

    tensor_parallel_sizes: by the setting's name, such as "decode.parallel.tensor_parallel_size"
    draft_models: directories of the models that guess for it, by the setting's name
    """
    drafts = draft_models or {}
    mistakes: list[str] = []
    has_own_code = False
    for name, directory in {"model.model": model.model, **drafts}.items():
        try:
            config = _read_files(Path(directory), model)
        except (UnreadableCheckpoint, InvalidGenerationConfig) as error:
            mistakes.append(f"{name}: {error}")
            continue
        has_own_code |= model.trust_remote_code and "auto_map" in config
    if mistakes or has_own_code:
        # Code that comes with a checkpoint is for the engines to run.
        return mistakes
    if "transformers" in sys.modules:
        from cluster.checks.model_probe import find_config_mistakes

        return find_config_mistakes(model, tensor_parallel_sizes, drafts)
    return _ask_child(model, tensor_parallel_sizes, drafts)


def _read_files(directory: Path, model: ModelConfig) -> dict[str, Any]:
    """Return config.json, if the files are whole. Raises UnreadableCheckpoint, InvalidGenerationConfig."""
    config = read_config_file(directory)
    if model.load_format == "auto":
        read_weights(directory)
    read_generation_file(directory)
    return config


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


def _ask_child(
    model: ModelConfig, tensor_parallel_sizes: Mapping[str, int], draft_models: Mapping[str, str]
) -> list[str]:
    """Ask in a process of its own: transformers is imported there without torch, which this process may need."""
    sizes, drafts = dict(tensor_parallel_sizes), dict(draft_models)
    question = json.dumps({"model": model.model_dump(), "sizes": sizes, "drafts": drafts})
    command = [sys.executable, "-m", "cluster.checks.model_probe"]
    try:
        done = subprocess.run(
            command, input=question, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True
        )
    except subprocess.TimeoutExpired:
        # The machine is slow, which says nothing about the model: the engines will ask again.
        logger.warning("the model's config was not checked in time", extra={"timeout_s": _PROBE_TIMEOUT_S})
        return []
    except subprocess.CalledProcessError as error:
        last = "".join(str(error.stderr).strip().splitlines()[-1:])
        return [f"model.model: {str(Path(model.model) / 'config.json')!r} cannot be used: {last}"]
    mistakes: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return [str(mistake) for mistake in mistakes]
