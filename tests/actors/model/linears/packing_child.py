"""A process that loads a model, packs it, and prints how much memory it had, in bytes: before, at most, after."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.config import ModelConfig
from actors.model.linears.packing import pack_linears
from actors.model.loader import load_model

_HIDDEN, _INTERMEDIATE, _NUM_LAYERS = 1024, 2048, 10


def make_checkpoints(directory: Path) -> None:
    """Save a Llama of 340 MB in float32, and the config of one with a single such layer."""
    LlamaForCausalLM(_config(_NUM_LAYERS)).save_pretrained(directory / "large")
    _config(1).save_pretrained(directory / "small")


def _config(num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=512,
        hidden_size=_HIDDEN,
        intermediate_size=_INTERMEDIATE,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        dtype="float32",
    )


def main() -> None:
    """Print memory before packing, at most, and after it; then the size of the weights and of the largest product."""
    torch.set_num_threads(1)
    directory, dtype = sys.argv[1:]
    settings = {"device": "cpu", "dtype": dtype, "weight_packing": "none"}
    # What every process pays once, whatever the size of its model: code that oneDNN generates, memory for its trials.
    small = {"model": f"{directory}/small", "load_format": "dummy", "weight_packing": "onednn"}
    load_model(ModelConfig.model_validate(settings | small))
    loaded = load_model(ModelConfig.model_validate(settings | {"model": f"{directory}/large"}))
    weights = sum(parameter.nbytes for parameter in loaded.forward.model.parameters())
    largest = 2 * _HIDDEN * _INTERMEDIATE * loaded.dtype.itemsize
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    # Without this the peak would be that of loading.
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    report = pack_linears(loaded.forward, loaded.architecture)
    assert report.num_packed == 7 * _NUM_LAYERS + 1
    sys.stdout.write(" ".join(map(str, (before, _memory("VmHWM"), _memory("VmRSS"), weights, largest))))


def _memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
