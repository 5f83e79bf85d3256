"""Measure where a decode step's time goes.

One engine in this process decodes a full batch. Each part of EngineCore.step() is timed with a wrapper around its one
function; what is left of the step is printed as "rest".

    python -m benchmarks.decode_step --batch 16 --context 384
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from actors.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from actors.core.requests.block_hash import PUBLIC_KEY
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.core.scheduler import Scheduler
from actors.engine_core import EngineCore
from actors.executor import InProcessExecutor
from actors.model import launched_step as launched_step_module
from actors.model import model_runner as model_runner_module
from actors.model.attention import cascade
from actors.model.attention.torch_backend import TorchAttention, TorchBatch
from actors.model.attention.vllm_cpu_backend import VllmCpuAttention, VllmCpuBatch
from actors.model.input_batch import InputBatch
from actors.model.loaded_runner import LoadedRunner
from actors.model.model_runner import ModelRunner
from actors.sessions.session_messages import Outputs, encode
from actors.worker import Worker
from cluster.config import DEMO_MODEL

_NUM_WARM_STEPS = 3


class Parts:
    """Times calls by name; a part's time includes what it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._in_step: dict[str, float] = defaultdict(float)
        self._wrapped = ExitStack()

    def close(self) -> None:
        """Put the functions back that were wrapped."""
        self._wrapped.close()

    def wrap(self, owner: Any, attribute: str, name: str) -> None:  # a class or a module
        """Time every call of owner.attribute as part `name`."""
        original: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._in_step[name] += time.perf_counter() - start_s

        setattr(owner, attribute, timed)
        self._wrapped.callback(setattr, owner, attribute, original)

    def time(self, name: str, call: Callable[[], object]) -> None:
        """Time one call as part `name`."""
        start_s = time.perf_counter()
        call()
        self._in_step[name] += time.perf_counter() - start_s

    def end_step(self, step_s: float) -> None:
        """Close the books of one step."""
        for name, seconds in self._in_step.items():
            self.seconds[name].append(seconds)
        self.seconds["step"].append(step_s)
        self._in_step.clear()


def run(
    model: Annotated[Path, typer.Option()] = DEMO_MODEL,
    dtype: Annotated[str, typer.Option()] = "float32",
    batch: Annotated[int, typer.Option()] = 16,
    context: Annotated[int, typer.Option()] = 384,
    steps: Annotated[int, typer.Option()] = 40,
    threads: Annotated[int, typer.Option()] = 1,
    overlap: Annotated[bool, typer.Option(help="Schedule a step while the one before it runs.")] = False,
    common: Annotated[int, typer.Option(help="Tokens of the context that all requests begin with.")] = 0,
    attention_backend: Annotated[str, typer.Option(help="auto, torch or vllm_cpu.")] = "auto",
    key_order: Annotated[str, typer.Option(help="auto, plain or transposed.")] = "auto",
    block_size: Annotated[int, typer.Option()] = 16,
    weight_packing: Annotated[str, typer.Option(help="See model.weight_packing in docs/settings.md.")] = "none",
    dummy: Annotated[bool, typer.Option(help="Draw the weights; the directory needs a config.json only.")] = False,
    read_once: Annotated[bool, typer.Option(help="Read the common tokens' keys once where it pays.")] = True,
) -> None:
    """Decode and print the breakdown of the median step."""
    if not read_once:
        cascade._MIN_TOKENS = sys.maxsize
    cache: dict[str, str | int] = {
        "attention_backend": attention_backend,
        "key_order": key_order,
        "block_size": block_size,
    }
    model_config = ModelConfig.model_validate(
        {
            "model": str(model),
            "dtype": dtype,
            "device": "cpu",
            "weight_packing": weight_packing,
            "load_format": "dummy" if dummy else "auto",
        }
    )
    core = _engine(model_config, batch, context + steps + 8, threads, overlap=overlap, cache=cache)
    with closing(Parts()) as parts:
        _wrap_all(parts)
        _decode(core, parts, batch=batch, context=context, common=common, steps=steps)
        title = f"decode step, batch {batch}, context {context}, {dtype}, {threads} thread(s), overlap {overlap}"
        Console().print(_table(parts, title))


def _wrap_all(parts: Parts) -> None:
    """Time the parts of EngineCore.step()."""
    parts.wrap(Scheduler, "schedule", "schedule")
    parts.wrap(Scheduler, "update_from_output", "update")
    parts.wrap(InputBatch, "update", "input batch: update")
    parts.wrap(InputBatch, "prepare", "input batch: prepare")
    for backend in (TorchAttention, VllmCpuAttention):
        parts.wrap(backend, "prepare", "attention: step metadata")
    for step in (TorchBatch, VllmCpuBatch):
        parts.wrap(step, "attend", "attention: all layers (inside forward)")
    parts.wrap(ModelRunner, "_forward", "forward")
    parts.wrap(model_runner_module, "start_sampling", "sample")
    parts.wrap(InputBatch, "sampling_batch", "sample: bookkeeping")
    parts.wrap(InputBatch, "extend", "input batch: extend")
    parts.wrap(InputBatch, "fill", "input batch: fill")
    parts.wrap(launched_step_module, "collect", "collect")


def _decode(core: EngineCore, parts: Parts, *, batch: int, context: int, common: int, steps: int) -> None:
    """Compute the prompts, and time the steps that decode all of them."""
    for index in range(batch):
        prompt = [*_tokens(common, batch), *_tokens(context - common, index)]
        params = SamplingParams(temperature=0.0, max_tokens=steps + 4, ignore_eos=True)
        core.submit(EngineCoreRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=params))
        if common and index == 0:
            core.step()  # The others find it in the prefix cache.
    while core.scheduler.get_request_counts() != (batch, 0) or any(
        request.num_output_tokens == 0 for request in core.scheduler.running
    ):
        core.step()
    for index in range(steps - _NUM_WARM_STEPS):
        parts._in_step.clear()
        start_s = time.perf_counter()
        result = core.step()
        step_s = time.perf_counter() - start_s
        for outputs in result.outputs.values():
            parts.time("output messages: encode", partial(encode, Outputs(outputs)))
        if index >= _NUM_WARM_STEPS:
            parts.end_step(step_s)


def _tokens(count: int, seed: int) -> list[int]:
    tokens: list[int] = torch.randint(3, 2000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def _engine(
    model: ModelConfig,
    batch: int,
    max_model_len: int,
    threads: int,
    *,
    overlap: bool,
    cache: Mapping[str, str | int] = MappingProxyType({}),
) -> EngineCore:
    """Make an engine that computes every prompt in one step. cache: further settings of the KV cache"""
    settings = {"block_size": 16, **cache}
    num_blocks = batch * (max_model_len // int(settings["block_size"]) + 2)
    config = EngineConfig.model_validate(
        {
            "model": model,
            "cache": CacheConfig.model_validate({**settings, "num_blocks": num_blocks}),
            # Every prompt in one step: so all requests decode for as long as is measured.
            "scheduler": SchedulerConfig(
                max_num_seqs=batch, max_num_batched_tokens=batch * max_model_len, overlap=overlap
            ),
            "parallel": ParallelConfig(num_threads=threads),
        }
    )
    loaded = LoadedRunner.load(config.model, config.cache, config.scheduler, config.parallel)
    runner = loaded.initialize(loaded.determine_num_blocks())
    runner.warm_up()
    runner.capture_graphs(config.model, batch, print)
    num_blocks = runner.layout.num_blocks
    scheduler = Scheduler(config.scheduler, config.cache, num_blocks, runner.max_model_len, clock=time.time)
    return EngineCore(scheduler, InProcessExecutor(Worker(runner, None), overlap=overlap), hash_key=PUBLIC_KEY)


def _table(parts: Parts, title: str) -> Table:
    table = Table("part", "median ms", "share", title=title)
    step_s = statistics.median(parts.seconds.pop("step"))
    medians = {name: statistics.median(seconds) for name, seconds in parts.seconds.items()}
    top_level = {name: seconds for name, seconds in medians.items() if "inside" not in name}
    for name, seconds in sorted(medians.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{seconds * 1e3:.2f}", f"{seconds / step_s:.0%}")
    table.add_row("rest", f"{(step_s - sum(top_level.values())) * 1e3:.2f}", "")
    table.add_row("step", f"{step_s * 1e3:.2f}", "100%")
    return table


if __name__ == "__main__":
    typer.run(run)
