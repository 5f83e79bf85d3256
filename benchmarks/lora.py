"""Measure what LoRA adapters cost: configured and unused, and with several of them in a batch.

Two runners of one model compute the same steps in one thread, one without `lora` in its configuration. Variants take
turns, step by step, and the processor time of each one's fastest step counts: other load hardly shows in it.

    python -m benchmarks.lora --hidden 1024 --layers 8
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from actors.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from actors.lora_config import LoraConfig
from actors.model.attention.batch_attention import BatchShape
from actors.model.loaded_runner import LoadedRunner
from actors.model.model_runner import ModelRunner
from cluster.config import DEMO_MODEL

_BLOCK_SIZE = 16
_NUM_ADAPTERS = (1, 4, 16)
_MODULES = {
    "self_attn.q_proj": ("hidden", "hidden"),
    "self_attn.k_proj": ("hidden", "kv"),
    "self_attn.v_proj": ("hidden", "kv"),
    "self_attn.o_proj": ("hidden", "hidden"),
    "mlp.gate_proj": ("hidden", "inner"),
    "mlp.up_proj": ("hidden", "inner"),
    "mlp.down_proj": ("inner", "hidden"),
}


def run(
    hidden: Annotated[int, typer.Option(help="Size of the model, of random weights.")] = 1024,
    layers: Annotated[int, typer.Option()] = 8,
    rank: Annotated[int, typer.Option()] = 16,
    batch: Annotated[int, typer.Option(help="Requests that decode.")] = 32,
    context: Annotated[int, typer.Option(help="Tokens that each of them has.")] = 128,
    prompt: Annotated[int, typer.Option(help="Tokens of all prompts of a prefill step.")] = 512,
    rounds: Annotated[int, typer.Option()] = 30,
) -> None:
    """Measure decode steps and prefill steps, and print the table."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        checkpoint = _write_checkpoint(root / "model", hidden, layers)
        adapters = {
            f"adapter-{n}": _write_adapter(root / str(n), checkpoint, rank, n) for n in range(_NUM_ADAPTERS[-1])
        }
        plain = _make_runner(checkpoint, max(batch, prompt), None)
        lora = LoraConfig(adapters=adapters, max_lora_rank=rank)
        adapted = _make_runner(checkpoint, max(batch, prompt), lora)
    table = Table("step", "adapters", "CPU ms", "against none", title=f"hidden {hidden}, {layers} layers, rank {rank}")
    _measure(table, f"decode, {batch} requests", plain, adapted, (batch, 1, context), rounds)
    for num_requests in (1, 4, 16):
        name = f"prefill, {num_requests} x {prompt // num_requests} tokens"
        _measure(table, name, plain, adapted, (num_requests, prompt // num_requests, 0), rounds)
    Console().print(table)


def _measure(
    table: Table, name: str, plain: ModelRunner, adapted: ModelRunner, work: tuple[int, int, int], rounds: int
) -> None:
    """work: requests, tokens of each in the step, tokens that each has before it."""
    num_requests = work[0]
    keys = [adapter.key for adapter in adapted.adapters.configured] if adapted.adapters is not None else []
    steps: dict[str, Callable[[], None]] = {
        "not configured": _step(plain, work, None),
        "configured, unused": _step(adapted, work, [None] * num_requests),
    }
    for count in _NUM_ADAPTERS:
        if count <= num_requests:
            steps[str(count)] = _step(adapted, work, [keys[index % count] for index in range(num_requests)])
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for variant, step in steps.items():
            step()  # Adapters get their slots.
            start_s = time.thread_time()
            step()
            best[variant] = min(best[variant], time.thread_time() - start_s)
    for variant, seconds in best.items():
        table.add_row(name, variant, f"{seconds * 1e3:.2f}", f"{seconds / best['not configured'] - 1:+.1%}")


def _step(runner: ModelRunner, work: tuple[int, int, int], keys: Sequence[str | None] | None) -> Callable[[], None]:
    num_requests, num_tokens, num_before = work
    lens = np.full(num_requests, num_tokens, dtype=np.int64)
    blocks_each = -(-(num_tokens + num_before) // _BLOCK_SIZE)
    shape = BatchShape(
        np.concatenate([[0], np.cumsum(lens)]),
        np.full(num_requests, num_before, dtype=np.int64),
        np.arange(num_requests * blocks_each).reshape(num_requests, blocks_each),
    )
    token_ids = np.random.default_rng(0).integers(0, 1000, num_requests * num_tokens)
    positions = np.tile(np.arange(num_before, num_before + num_tokens), num_requests)
    names = np.array(keys, dtype=object)

    @torch.inference_mode()
    def step() -> None:
        if runner.adapters is not None:
            runner.adapters.begin_step(names, lens)
        runner._forward(token_ids, positions, shape, np.cumsum(lens) - 1)

    return step


def _make_runner(checkpoint: Path, num_tokens: int, lora: LoraConfig | None) -> ModelRunner:
    loaded = LoadedRunner.load(
        ModelConfig(model=str(checkpoint), dtype="float32", device="cpu", load_format="dummy"),
        CacheConfig(block_size=_BLOCK_SIZE, num_blocks=1024),
        SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=num_tokens, max_loras=_NUM_ADAPTERS[-1]),
        ParallelConfig(num_threads=1),
    )
    if lora is not None:
        loaded.enable_lora(lora, lambda: None)
    return loaded.initialize(loaded.determine_num_blocks())


def _write_checkpoint(directory: Path, hidden: int, layers: int) -> Path:
    """The demo model's config at another size; weights are drawn when it is loaded."""
    directory.mkdir()
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    config |= {
        "hidden_size": hidden,
        "intermediate_size": 5 * hidden // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _write_adapter(directory: Path, checkpoint: Path, rank: int, seed: int) -> str:
    directory.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    sizes = {"hidden": config["hidden_size"], "inner": config["intermediate_size"]}
    sizes["kv"] = config["num_key_value_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (num_in, num_out) in _MODULES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = 0.01 * torch.randn(rank, sizes[num_in], generator=generator)
            tensors[f"{name}.lora_B.weight"] = 0.01 * torch.randn(sizes[num_out], rank, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return str(directory)


if __name__ == "__main__":
    typer.run(run)
