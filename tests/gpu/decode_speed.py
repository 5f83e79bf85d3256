"""Times decode steps of a model with random weights, eagerly and as graphs, beside a copy within the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig

from actors.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from actors.model.attention.batch_attention import BatchShape
from actors.model.graphs.configured_graphs import make_decode_step
from actors.model.input_batch import StepInputs
from actors.model.loaded_runner import LoadedRunner
from actors.model.model_runner import ModelRunner
from kv_transfer.device_kind import device_module
from tests.gpu.report_figures import DecodeFigure, ModelSize

_BLOCK_SIZE = 16
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
"""A Llama of 1.2 B parameters."""


def write_config(directory: Path, settings: dict[str, int], max_positions: int) -> Path:
    """Write a checkpoint's config, for random weights in bfloat16."""
    fixed = {"max_position_embeddings": max_positions, "tie_word_embeddings": True}
    config = LlamaConfig.from_dict(settings | fixed | {"architectures": ["LlamaForCausalLM"]})
    config.save_pretrained(directory)
    return directory


def measure_decode(
    directory: Path, cases: Sequence[tuple[int, int]], *, dtype: str = "bfloat16", num_steps: int = 50
) -> list[DecodeFigure]:
    """Time a decode step for each (batch, context)."""
    batches = [batch for batch, _ in cases]
    num_blocks = max(batch * -(-(context + 1) // _BLOCK_SIZE) for batch, context in cases)
    config = ModelConfig.model_validate(
        {
            "model": str(directory),
            "load_format": "dummy",
            "device": "cuda",
            "dtype": dtype,
            "cuda_graph_sizes": tuple(sorted(set(batches))),
        }
    )
    most = max(batches)
    loaded = LoadedRunner.load(
        config,
        CacheConfig(block_size=_BLOCK_SIZE, num_blocks=num_blocks),
        SchedulerConfig(max_num_seqs=most, max_num_batched_tokens=max(512, most)),
        ParallelConfig(),
    )
    runner = loaded.initialize(loaded.determine_num_blocks())
    runner.warm_up()
    runner.capture_graphs(config, most, print)
    model = loaded.model.forward.model
    weights = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    size = ModelSize(weights, runner.layout.block_size_bytes // _BLOCK_SIZE)
    return [_measure(runner, batch, context, size, num_steps) for batch, context in cases]


@torch.inference_mode()
def _measure(runner: ModelRunner, batch: int, context: int, size: ModelSize, num_steps: int) -> DecodeFigure:
    num_blocks = -(-(context + 1) // _BLOCK_SIZE)
    tables = np.arange(batch * num_blocks).reshape(batch, num_blocks)
    shape = BatchShape(np.arange(batch + 1), np.full(batch, context), tables)
    rows = np.arange(batch)
    inputs = StepInputs(np.full(batch, 7), np.full(batch, context), shape, rows, rows, rows)

    def run_eagerly() -> object:
        return runner._forward_step(inputs, inputs.logits_indices)

    graph_s, graphs = None, runner._graphs
    if graphs is not None and (graph_size := graphs.size_for(inputs)) is not None:
        step = make_decode_step(inputs, _BLOCK_SIZE, None)
        graph_s = seconds_per_call(runner.kv_cache.device, lambda: graphs.run(step, graph_size), num_steps)
    eager_s = seconds_per_call(runner.kv_cache.device, run_eagerly, num_steps)
    return DecodeFigure(batch, context, size.step_bytes(batch, context), eager_s, graph_s)


def seconds_per_call(device: torch.device, call: Callable[[], object], num_calls: int) -> float:
    """Time calls that queue work on the device, after a few that are not counted."""
    module = device_module(device)
    for _ in range(3):
        call()
    module.synchronize(device)
    start_s = time.perf_counter()
    for _ in range(num_calls):
        call()
    module.synchronize(device)
    return (time.perf_counter() - start_s) / num_calls


def copy_bytes_per_s(device: torch.device, size_bytes: int = 1 << 30, num_copies: int = 20) -> float:
    """Return the bytes that a copy within the device reads and writes in a second."""
    source, target = (torch.zeros(size_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size_bytes / seconds_per_call(device, lambda: target.copy_(source, non_blocking=True), num_copies)
