"""Measure what drafts gain, and what they cost.

One engine in this process answers the same prompts with and without drafts, in turns, best of several. Machines are
shared: beside tokens per second there are tokens per second of this thread's CPU time, which others do not disturb.

    python -m benchmarks.speculative
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from actors.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig
from actors.core.outputs.scheduler_stats import SpecDecodingStats
from actors.core.requests.block_hash import PUBLIC_KEY
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.core.scheduler import Scheduler
from actors.engine_core import EngineCore
from actors.executor import InProcessExecutor
from actors.model.loaded_runner import LoadedRunner
from actors.worker import Worker
from cluster.config import DEMO_MODEL

_FUNCTIONS = "".join(
    f"def {name}(a, b):\n    return a {sign} b\n\n" for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*"))
)
_RECORDS = "".join(f'{{"id": {number}, "name": "item", "value": {number * 7}}},\n' for number in range(12))
_PROSE = "The engine reads the prompt and builds a cache, and then another one takes it over because"
WORKLOADS = {"code": _FUNCTIONS * 3, "records": _RECORDS, "prose": _PROSE}


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Times in seconds."""

    token_ids: list[list[int]]
    num_steps: int
    wall_s: float
    cpu_s: float

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all answers."""
        return sum(map(len, self.token_ids))


def run(
    model: Annotated[Path, typer.Option()] = DEMO_MODEL,
    workloads: Annotated[str, typer.Option()] = ",".join(WORKLOADS),
    batches: Annotated[str, typer.Option()] = "1,4,16",
    temperature: Annotated[float, typer.Option()] = 0.0,
    num_tokens: Annotated[int, typer.Option(help="Drafted at a time.")] = SpeculativeConfig().num_tokens,
    max_step_tokens: Annotated[int, typer.Option()] = SpeculativeConfig().max_step_tokens,
    draft_model: Annotated[Path | None, typer.Option(help="Let this smaller checkpoint draft, not n-grams.")] = None,
    output: Annotated[int, typer.Option(help="Tokens of an answer.")] = 192,
    repeats: Annotated[int, typer.Option()] = 3,
) -> None:
    """Measure and print a row for each workload and batch."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    sizes = [int(size) for size in batches.split(",")]
    speculative = SpeculativeConfig(
        method="ngram" if draft_model is None else "draft_model",
        model=None if draft_model is None else str(draft_model),
        num_tokens=num_tokens,
        max_step_tokens=max_step_tokens,
    )
    table = Table(
        "prompt", "batch", "tok/s", "with", "ratio", "CPU ratio", "steps", "with", "accepted by position",
        title=f"temperature {temperature}, {num_tokens} drafts, {output} tokens each",
    )  # fmt: skip
    for name in workloads.split(","):
        prompt = tokenizer.encode(WORKLOADS[name]).ids
        for size in sizes:
            # Neighbours differ in their first token, or the prefix cache would make them one.
            prompts = [[5 + index, *prompt] for index in range(size)]
            engines = [_engine(model, size, chosen) for chosen in (None, speculative)]
            plain, drafted = _best(
                engines, prompts, SamplingParams(temperature=temperature, max_tokens=output), repeats
            )
            if temperature == 0.0:
                assert plain.token_ids == drafted.token_ids, "drafts must not change a token"
            table.add_row(
                name,
                str(size),
                f"{plain.num_tokens / plain.wall_s:.0f}",
                f"{drafted.num_tokens / drafted.wall_s:.0f}",
                f"{plain.wall_s / drafted.wall_s:.2f}",
                f"{plain.cpu_s / drafted.cpu_s:.2f}",
                str(plain.num_steps),
                str(drafted.num_steps),
                _acceptance(engines[1].make_stats().spec_decoding_stats),
            )
    Console(width=140).print(table)


def _engine(model: Path, max_num_seqs: int, speculative: SpeculativeConfig | None) -> EngineCore:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, speculative=speculative)
    cache = CacheConfig(num_blocks=64 * max_num_seqs, enable_prefix_caching=False)
    loaded = LoadedRunner.load(
        ModelConfig(model=str(model), dtype="float32", device="cpu"), cache, config, ParallelConfig(num_threads=1)
    )
    runner = loaded.initialize(loaded.determine_num_blocks())
    runner.warm_up()
    scheduler = Scheduler(config, cache, runner.layout.num_blocks, runner.max_model_len, clock=time.time)
    return EngineCore(scheduler, InProcessExecutor(Worker(runner, None)), hash_key=PUBLIC_KEY)


def _best(
    engines: Sequence[EngineCore], prompts: Sequence[list[int]], params: SamplingParams, repeats: int
) -> list[Figures]:
    """The quickest run of each engine; they take turns."""
    runs = [[_answer(engine, prompts, params) for engine in engines] for _ in range(repeats)]
    return [min(own, key=lambda figures: figures.cpu_s) for own in zip(*runs, strict=True)]


def _answer(engine: EngineCore, prompts: Sequence[list[int]], params: SamplingParams) -> Figures:
    """Time from the first token of all to the last: the prompts' own steps are not counted."""
    token_ids: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.submit(EngineCoreRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=params))
    num_steps, begin_s, begin_cpu_s = 0, time.perf_counter(), time.thread_time()
    num_first = 0
    while not (result := engine.step()).is_idle:
        num_steps += 1
        for outputs in result.outputs.values():
            for output in outputs.outputs:
                token_ids[int(output.request_id)] += output.new_token_ids
        if not all(token_ids):
            num_first, begin_s, begin_cpu_s = num_steps, time.perf_counter(), time.thread_time()
    return Figures(token_ids, num_steps - num_first, time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s)


def _acceptance(stats: SpecDecodingStats | None) -> str:
    if stats is None or not stats.num_drafts:
        return "-"
    return " ".join(f"{count / stats.num_drafts:.2f}" for count in stats.num_accepted_tokens_per_pos)


if __name__ == "__main__":
    typer.run(run)
