"""How many embeddings a second does an engine give, beside plain transformers on the same texts?

One engine in this process, steps of up to 512 tokens; transformers one text at a time, and in padded batches, as they
come and sorted by length. Pooling is the mean: every token is computed. Then what requests without vectors pay for it.

    python -m benchmarks.embeddings
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModel

from actors.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from actors.core.outputs.scheduler_output import SchedulerOutput, StepBatch
from actors.core.requests.block_hash import PUBLIC_KEY
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import PoolingParams, SamplingParams
from actors.core.scheduler import Scheduler
from actors.engine_core import EngineCore
from actors.executor import InProcessExecutor
from actors.model.loaded_runner import LoadedRunner
from actors.model.pooling.pooler import Pooler
from actors.worker import Worker
from cluster.config import DEMO_MODEL

Prompts = Sequence[list[int]]

_BATCH = 32


def run(
    model: Annotated[Path, typer.Option()] = DEMO_MODEL,
    texts: Annotated[int, typer.Option()] = 256,
    repeats: Annotated[int, typer.Option()] = 3,
    threads: Annotated[int, typer.Option()] = 1,
) -> None:
    """Print a table of embeddings per second, each way in turn, and the cost of a step that has none."""
    torch.set_num_threads(threads)
    console = Console()
    stock = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    engine = _engine(model)
    for title, prompts in _workloads(texts, stock.config.vocab_size).items():
        by_length = sorted(prompts, key=len)
        ways: dict[str, Callable[[], dict[int, Tensor]]] = {
            "transformers, one at a time": partial(_embed_stock, stock, prompts, 1),
            f"transformers, padded batches of {_BATCH}": partial(_embed_stock, stock, prompts, _BATCH),
            "the same, sorted by length": partial(_embed_stock, stock, by_length, _BATCH),
            "raypd, one engine": partial(_embed, engine, prompts),
        }
        best = dict.fromkeys(ways, float("inf"))
        answers: dict[str, dict[int, Tensor]] = {}
        for _ in range(repeats):
            for name, embed in ways.items():
                started_s = time.process_time()
                answers[name] = embed()
                best[name] = min(best[name], time.process_time() - started_s)
        _compare(answers["transformers, one at a time"], answers["raypd, one engine"])
        console.print(_table(title, prompts, best))
    engine.shutdown()
    console.print(f"a step without vectors: {_idle_cost_ns():.0f} ns")


def _workloads(num_texts: int, vocab_size: int) -> dict[str, Prompts]:
    rng = random.Random(0)

    def prompts(lengths: Sequence[int]) -> Prompts:
        return [rng.choices(range(300, vocab_size), k=length) for length in lengths]

    return {
        "queries (8 to 24 tokens)": prompts([rng.randint(8, 24) for _ in range(num_texts)]),
        "passages (16 to 256 tokens)": prompts([rng.randint(16, 256) for _ in range(num_texts)]),
    }


def _engine(model: Path) -> EngineCore:
    cache, scheduler_config = (
        CacheConfig(num_blocks=2048, enable_prefix_caching=False),
        SchedulerConfig(max_num_seqs=64),
    )
    model_config = ModelConfig(model=str(model), dtype="float32", device="cpu")
    loaded = LoadedRunner.load(model_config, cache, scheduler_config, ParallelConfig())
    runner = loaded.initialize(loaded.determine_num_blocks())
    scheduler = Scheduler(scheduler_config, cache, runner.layout.num_blocks, runner.max_model_len, clock=time.time)
    return EngineCore(scheduler, InProcessExecutor(Worker(runner, None)), hash_key=PUBLIC_KEY)


def _embed(engine: EngineCore, prompts: Prompts) -> dict[int, Tensor]:
    """By the prompt's identity, for the order differs from way to way."""
    for index, prompt in enumerate(prompts):
        request = EngineCoreRequest(
            request_id=str(index),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(),
            pooling_params=PoolingParams(pooling="mean"),
        )
        engine.submit(request)
    vectors: dict[int, Tensor] = {}
    while len(vectors) < len(prompts):
        for batch in engine.step().outputs.values():
            for output in batch.outputs:
                assert output.pooling_output is not None, output.error
                vectors[id(prompts[int(output.request_id)])] = torch.tensor(output.pooling_output)
    return vectors


@torch.inference_mode()
def _embed_stock(model: Any, prompts: Prompts, batch_size: int) -> dict[int, Tensor]:  # transformers' own class
    vectors: dict[int, Tensor] = {}
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        longest = max(map(len, batch))
        tokens = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in batch])
        mask = torch.tensor([[1] * len(prompt) + [0] * (longest - len(prompt)) for prompt in batch])
        states = model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
        pooled = (states * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        for prompt, vector in zip(batch, torch.nn.functional.normalize(pooled, dim=1), strict=True):
            vectors[id(prompt)] = vector
    return vectors


def _compare(expected: dict[int, Tensor], found: dict[int, Tensor]) -> None:
    worst = max(float((vector - found[key]).abs().max()) for key, vector in expected.items())
    assert worst < 1e-4, f"an embedding differs by {worst}"


def _table(title: str, prompts: Prompts, best_s: dict[str, float]) -> Table:
    num_tokens = sum(map(len, prompts))
    table = Table("way", "embeddings/s", "tokens/s", title=f"{len(prompts)} {title}, CPU time")
    for name, seconds in best_s.items():
        table.add_row(name, f"{len(prompts) / seconds:.0f}", f"{num_tokens / seconds:.0f}")
    return table


def _idle_cost_ns(num_steps: int = 100_000) -> float:
    """Measure what a worker does for vectors in a step whose requests want none."""
    pooler, step = Pooler(), SchedulerOutput(StepBatch.empty(), [], set())
    assert not np.any(step.batch.rows)
    started_s = time.perf_counter()
    for _ in range(num_steps):
        pooler.update(step)
        pooler.begin_step(step.batch)
    return (time.perf_counter() - started_s) / num_steps * 1e9


if __name__ == "__main__":
    typer.run(run)
