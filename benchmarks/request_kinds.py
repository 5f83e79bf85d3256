"""Measure what log-probabilities of a prompt, prompts of embeddings and several samples cost, used and unused.

One engine in this process, the demo model in float32, one thread. Kinds take turns, and the fastest of each counts.

    python -m benchmarks.request_kinds
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from actors.config import ModelConfig
from actors.core.outputs.scheduler_output import StepBatch
from actors.core.requests.request import EngineCoreRequest, PromptEmbeds
from actors.core.requests.sampling_params import SamplingParams
from actors.engine_core import EngineCore
from actors.executor import InProcessExecutor
from actors.model.model_runner import ModelRunner
from benchmarks.decode_step import _engine, _tokens
from cluster.config import DEMO_MODEL

_NUM_OUTPUT_TOKENS = 32
_NUM_CALLS = 20_000


def run(
    context: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 1024,
    samples: Annotated[int, typer.Option()] = 8,
    rounds: Annotated[int, typer.Option()] = 5,
) -> None:
    """Print milliseconds."""
    model = ModelConfig(model=str(DEMO_MODEL), dtype="float32", device="cpu")
    core = _engine(model, samples, context + _NUM_OUTPUT_TOKENS + 8, 1, overlap=False)
    kinds: dict[str, Callable[[], float]] = {
        "prefill": lambda: _prefill(core, context),
        "prefill, prompt_logprobs = 0": lambda: _prefill(core, context, num_logprobs=0),
        "prefill, prompt_logprobs = 5": lambda: _prefill(core, context, num_logprobs=5),
        "prefill of embeddings": lambda: _prefill(core, context, is_embeds=True),
        f"{samples} requests with the same prompt at once": lambda: _sample(core, context, samples, follows=False),
        f"{samples} samples of it, following the first": lambda: _sample(core, context, samples, follows=True),
    }
    best_s = dict.fromkeys(kinds, float("inf"))
    for _ in range(rounds):
        for kind, measure in kinds.items():
            best_s[kind] = min(best_s[kind], measure())
    table = Table("kind", "ms", title=f"prompts of {context} tokens")
    for kind, seconds in best_s.items():
        table.add_row(kind, f"{seconds * 1e3:.1f}")
    for kind, seconds in _measure_unused(core).items():
        table.add_row(kind, f"{seconds * 1e3:.6f}")
    Console().print(table)


def _prefill(core: EngineCore, context: int, *, num_logprobs: int | None = None, is_embeds: bool = False) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=num_logprobs)
    request = EngineCoreRequest(request_id="r", prompt_token_ids=_tokens(context, 0), sampling_params=params)
    if is_embeds:
        size = _runner_of(core).prompt_embeds_size
        data = np.random.default_rng(0).standard_normal((context, size), dtype=np.float32).tobytes()
        embeds = PromptEmbeds(data, context, size, "float32", b"digest")
        request = replace(request, prompt_token_ids=[0] * context, prompt_embeds=embeds)
    return _run(core, [request])


def _sample(core: EngineCore, context: int, num_samples: int, *, follows: bool) -> float:
    params = SamplingParams(temperature=1.0, max_tokens=_NUM_OUTPUT_TOKENS, ignore_eos=True)
    request = EngineCoreRequest(request_id="0", prompt_token_ids=_tokens(context, 0), sampling_params=params)
    others = [
        replace(request, request_id=str(index), sampling_params=replace(params, seed=index))
        for index in range(1, num_samples)
    ]
    return _run(core, [request], others) if follows else _run(core, [request, *others])


def _run(
    core: EngineCore, requests: list[EngineCoreRequest], followers: list[EngineCoreRequest] | None = None
) -> float:
    """Seconds until all have ended. followers: submitted when there are two tokens."""
    core.scheduler.reset_prefix_cache()
    started_s, num_outputs, waiting = time.perf_counter(), 0, followers or []
    for request in requests:
        core.submit(request)
    while True:
        result = core.step()
        num_outputs += sum(len(outputs.outputs) for outputs in result.outputs.values())
        if waiting and num_outputs >= 2:
            for request in waiting:
                core.submit(request)
            waiting = []
        if not waiting and not core.scheduler.has_requests():
            return time.perf_counter() - started_s


def _measure_unused(core: EngineCore) -> dict[str, float]:
    """Return what a step without any of it pays, in seconds."""
    runner = _runner_of(core)
    batch, starts = StepBatch.empty(), np.zeros(1, dtype=np.int64)
    prompts, embeds = runner._batch.prompt_logprobs, runner._prompt_embeds

    def look_at_prompts() -> None:
        prompts.find_parts(batch, starts)

    def put_in_place() -> None:
        with embeds.in_place(batch):
            pass

    return {
        "unused: prompt_logprobs, a step": _time(look_at_prompts),
        "unused: embeddings, a step": _time(put_in_place),
    }


def _time(call: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    for _ in range(_NUM_CALLS):
        call()
    return (time.perf_counter() - started_s) / _NUM_CALLS


def _runner_of(core: EngineCore) -> ModelRunner:
    assert isinstance(core.executor, InProcessExecutor)
    return core.executor._worker.runner


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(run)
