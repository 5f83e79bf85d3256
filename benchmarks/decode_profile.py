"""Compare decode steps of attention backends and orders of weights, and show which operators the time goes to.

One engine of each kind is in this process, and they take their steps in turns, so that other load of the machine hits
all of them. Then some steps of each, in turns too, run under torch's profiler. The model is a Llama of 82 M parameters
with drawn weights, unless a checkpoint is named. It prints tables in Markdown.

    python -m benchmarks.decode_profile --batch 16 --context 384
    python -m benchmarks.decode_profile --batch 1 --context 512 --compiled
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig

from actors.config import ModelConfig
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.engine_core import EngineCore
from actors.model.attention.vllm_cpu_library import load_library
from benchmarks.decode_step import _engine, _tokens

_NUM_WARM_STEPS: Final = 3
_NUM_PROFILED_STEPS: Final = 10
_GROUPS: Final = {
    "linear layers": ("_linear_pointwise", "linear", "addmm", "::mm", "matmul", "bmm"),
    "attention": ("cpu_attention_with_kv_cache", "scaled_dot_product", "softmax"),
    "KV read and written": ("cpu_attn_reshape_and_cache", "index_select", "index_copy", "index_fill", "index_put"),
    "norms and sums of squares": ("rsqrt", "pow", "mean", "rms_norm"),
    "activation": ("silu", "gelu"),
    "products, sums, signs (norms, rotary, residuals)": ("aten::mul", "aten::add", "neg"),
    "copies and casts": ("copy_", "cat", "contiguous", "clone", "_to_copy"),
    "views and allocations": ("view", "transpose", "slice", "as_strided", "empty", "unsqueeze", "reshape", "split"),
}
"""Operators by parts of their names; the first group that matches counts."""


def run(
    model: Annotated[Path | None, typer.Option(help="A checkpoint; the default is a drawn Llama of 82 M.")] = None,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    batch: Annotated[int, typer.Option()] = 16,
    context: Annotated[int, typer.Option()] = 384,
    steps: Annotated[int, typer.Option()] = 40,
    threads: Annotated[int, typer.Option()] = 1,
    block_size: Annotated[int, typer.Option()] = 16,
    compiled: Annotated[bool, typer.Option(help="Compile the step of one token in a further engine.")] = False,
) -> None:
    """Decode with every kind of engine, and print how long steps take and where the time goes."""
    backends = {"torch": "plain"}
    if (obstacle := load_library()) is None:
        backends["vllm_cpu"] = "transposed"
    else:
        print(f"without vllm_cpu: {obstacle}")
    with tempfile.TemporaryDirectory() as drawn:
        directory = model or _draw(Path(drawn))
        length = context + steps + _NUM_PROFILED_STEPS + 8
        cores: dict[str, EngineCore] = {}
        for backend, key_order in backends.items():
            for packing, is_compiled in (("none", False), ("auto", False), *([("auto", True)] if compiled else [])):
                settings: dict[str, str | bool] = {"model": str(directory), "dtype": dtype, "device": "cpu"}
                settings |= {"weight_packing": packing, "compile_one_token": is_compiled}
                settings["load_format"] = "auto" if model else "dummy"
                cache: dict[str, str | int] = {"attention_backend": backend, "key_order": key_order}
                cache["block_size"] = block_size
                name = f"{backend}, {'plain' if packing == 'none' else 'packed'}{', compiled' if is_compiled else ''}"
                config = ModelConfig.model_validate(settings)
                cores[name] = _engine(config, batch, length, threads, overlap=False, cache=cache)
                _prefill(cores[name], batch, context, length - context)
        print(f"batch {batch}, context {context}, {dtype}, {threads} thread(s), blocks of {block_size}\n")
        _print_steps(_time_in_turns(cores, steps))
        profiles: dict[str, list[dict[str, float]]] = {name: [] for name in cores}
        for _ in range(_NUM_PROFILED_STEPS):
            for name, core in cores.items():
                profiles[name].append(_profile_step(core))
        _print_operators({name: _medians(steps_of_one) for name, steps_of_one in profiles.items()})


def _draw(directory: Path) -> Path:
    LlamaConfig(
        vocab_size=4096,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory)
    return directory


def _prefill(core: EngineCore, batch: int, context: int, num_tokens: int) -> None:
    for index in range(batch):
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        prompt = _tokens(context, index)
        core.submit(EngineCoreRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=params))
    while any(request.num_output_tokens == 0 for request in core.scheduler.running) or not core.scheduler.running:
        core.step()


def _time_in_turns(cores: dict[str, EngineCore], steps: int) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of each engine's steps, by the clock and of processor time."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in cores}
    for index in range(steps):
        for name, core in cores.items():
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            core.step()
            if index >= _NUM_WARM_STEPS:
                seconds[name].append((time.perf_counter() - start_s, time.process_time() - start_cpu_s))
    return seconds


def _profile_step(core: EngineCore) -> dict[str, float]:
    """Return the milliseconds of a step by groups of operators, and what is outside of operators."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start_s = time.perf_counter()
        core.step()
        step_ms = (time.perf_counter() - start_s) * 1e3
    groups = dict.fromkeys((*_GROUPS, "others"), 0.0)
    events = profiler.key_averages()
    for event in events:
        group = next((name for name, parts in _GROUPS.items() if any(part in event.key for part in parts)), "others")
        groups[group] += event.self_cpu_time_total / 1e3
    groups["Python, dispatch, scheduler"] = max(0.0, step_ms - sum(groups.values()))
    groups["operators called (a number)"] = sum(event.count for event in events)
    return groups


def _medians(steps: list[dict[str, float]]) -> dict[str, float]:
    return {group: statistics.median(step[group] for step in steps) for group in steps[0]}


def _print_steps(seconds: dict[str, list[tuple[float, float]]]) -> None:
    print(
        "| attention, weights | step p50, ms | p10 | p90 | processor p50 | p10 | p90 |\n|---|---|---|---|---|---|---|"
    )
    for name, taken in seconds.items():
        numbers: list[float] = []
        for series in zip(*taken, strict=True):
            deciles = statistics.quantiles(series, n=10)
            numbers += (statistics.median(series), deciles[0], deciles[-1])
        print(f"| {name} | " + " | ".join(f"{number * 1e3:.1f}" for number in numbers) + " |")


def _print_operators(profiles: dict[str, dict[str, float]]) -> None:
    print("\nUnder the profiler, ms a step:\n")
    print("| operators | " + " | ".join(profiles) + " |\n|---" + "|---" * len(profiles) + "|")
    for group in next(iter(profiles.values())):
        numbers = [f"{groups[group]:.4g}" for groups in profiles.values()]
        print(f"| {group} | " + " | ".join(numbers) + " |")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    typer.run(run)
