"""Checks of the files of a checkpoint and of adapters, which find mistakes before an engine starts."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
    model: ModelConfig,
    tensor_parallel_sizes: Mapping[str, int],
    draft_models: Mapping[str, str] | None = None,
    *,
    stores: Sequence[str] = (),
    block_sizes: Mapping[str, int] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> list[str]:
    """Return why a model cannot be served with these settings; empty if its files show no mistake.

    tensor_parallel_sizes: numbers of ranks, by the setting's name, such as "decode.parallel.tensor_parallel_size"
    draft_models: directories of the draft models of speculative decoding, by the setting's name
    stores: the names of the settings that give engines KV stores
    block_sizes: tokens of a block, by the setting's name
    meanwhile: is called while a child process checks the config; not called if no child process is needed
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
        # Code that comes with a checkpoint is run in engines only, so its config cannot be checked here.
        return mistakes
    if "transformers" in sys.modules:
        from cluster.checks.model_probe import find_config_mistakes

        return find_config_mistakes(model, tensor_parallel_sizes, drafts, stores=stores, block_sizes=block_sizes or {})
    question = {
        "model": model.model_dump(),
        "sizes": dict(tensor_parallel_sizes),
        "drafts": dict(drafts),
        "stores": list(stores),
        "block_sizes": dict(block_sizes or {}),
    }
    return _ask_child(model, question, meanwhile)


def _read_files(directory: Path, model: ModelConfig) -> dict[str, Any]:
    """Return config.json after a check of all files. Raises UnreadableCheckpoint, InvalidGenerationConfig."""
    config = read_config_file(directory)
    if model.load_format == "auto":
        read_weights(directory)
    read_generation_file(directory)
    return config


def find_adapter_mistakes(lora: LoraConfig | None) -> list[str]:
    """Return why configured LoRA adapters cannot be served. Only engines check whether an adapter fits the model."""
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
    model: ModelConfig, question: Mapping[str, Any], meanwhile: Callable[[], None] | None = None
) -> list[str]:
    """Return the mistakes that a child process finds.

    The child imports transformers without torch. In this process that would be wrong, since it may need torch later.
    question: as model_probe.py reads it
    meanwhile: is called while the child runs; an error that it raises is raised once the child has ended
    """
    command = [sys.executable, "-m", "cluster.checks.model_probe"]
    # A copy of the environment: the process's own one moves in memory when `meanwhile` sets a variable, as the import
    # of Ray does, and a child that is being started would read it where it was ("Bad address").
    ask = partial(
        subprocess.run,
        command,
        input=json.dumps(question),
        env=os.environ.copy(),
        capture_output=True,
        text=True,
        timeout=_PROBE_TIMEOUT_S,
    )
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="model-check") as thread:
            asked = thread.submit(ask, check=True)
            if meanwhile is not None:
                meanwhile()
        done = asked.result()
    except subprocess.TimeoutExpired:
        # A timeout says nothing about the model, only that the machine is slow; the engines repeat this check at their
        # start.
        logger.warning("the model's config was not checked in time", extra={"timeout_s": _PROBE_TIMEOUT_S})
        return []
    except subprocess.CalledProcessError as error:
        last = "".join(str(error.stderr).strip().splitlines()[-1:])
        return [f"model.model: {str(Path(model.model) / 'config.json')!r} cannot be used: {last}"]
    mistakes: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return [str(mistake) for mistake in mistakes]
