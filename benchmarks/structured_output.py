"""Measure what structured output costs, where it is used and where it is not.

Engines decode the same batches with a form and without, in this process; the form is one that any output can go on in
for as long as is measured. Then the parts by themselves, also with a vocabulary of 128 000 tokens.

    python -m benchmarks.structured_output
"""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
import xgrammar
from rich.console import Console
from rich.table import Table

from actors.config import CacheConfig, GrammarConfig, ModelConfig, ParallelConfig, SchedulerConfig
from actors.core.requests.block_hash import PUBLIC_KEY
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams, StructuredOutputParams
from actors.core.scheduler import Scheduler
from actors.engine_core import EngineCore
from actors.executor import InProcessExecutor
from actors.model.grammar.compiler_process import CompilerProcess
from actors.model.grammar.manager import XGrammarManager
from actors.model.grammar.matching import TokenMatcher
from actors.model.grammar.token_text import TokenTexts
from actors.model.grammar.vocabulary import Vocabulary, deserialize_grammar, load_vocabulary
from actors.model.loaded_runner import LoadedRunner
from actors.model.sampling.token_masks import forbid_unmasked
from actors.worker import Worker
from cluster.config import DEMO_MODEL

_FORMS = {
    "no form": None,
    "regex": StructuredOutputParams("regex", "([a-z]+ )*"),
    "JSON schema": StructuredOutputParams(
        "json_schema", json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 1000})
    ),
}
_PERSON = StructuredOutputParams(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["name", "age", "tags"],
        }
    ),
)
_ANSWER = '{"name": "somebody with a name", "age": 41, "tags": ["one", "two"]}'
_NUM_LARGE = 128_000


def run(
    model: Annotated[Path, typer.Option()] = DEMO_MODEL,
    tokens: Annotated[int, typer.Option()] = 96,
    repeats: Annotated[int, typer.Option()] = 3,
    threads: Annotated[int, typer.Option()] = 1,
) -> None:
    """Print a table of decode steps and one of parts."""
    torch.set_num_threads(threads)
    console = Console()
    table = Table("batch", "output", "median step ms", "tok/s", title=f"{tokens} tokens, best of {repeats}")
    wake = threading.Event()
    for batch in (1, 4, 16):
        engine = _engine(model, batch, wake)
        best = {
            name: min(_decode(engine, wake, batch, tokens, form) for _ in range(repeats))
            for name, form in _FORMS.items()
        }
        for name, step_s in best.items():
            table.add_row(str(batch), name, f"{step_s * 1e3:.2f}", f"{batch / step_s:.0f}")
        engine.shutdown()
    console.print(table)
    console.print(_parts(model))


def _engine(model: Path, max_num_seqs: int, wake: threading.Event) -> EngineCore:
    cache, scheduler_config = CacheConfig(num_blocks=64 * max_num_seqs), SchedulerConfig(max_num_seqs=max_num_seqs)
    model_config = ModelConfig(model=str(model), dtype="float32", device="cpu")
    loaded = LoadedRunner.load(model_config, cache, scheduler_config, ParallelConfig())
    runner = loaded.initialize(loaded.determine_num_blocks())
    grammars = XGrammarManager.of_checkpoint(
        GrammarConfig(), model, vocab_size=runner.vocab_size, stop_token_ids=runner.eos_token_ids, on_ready=wake.set
    )
    scheduler = Scheduler(
        scheduler_config,
        cache,
        runner.layout.num_blocks,
        runner.max_model_len,
        structured_output=grammars,
        clock=time.time,
    )
    return EngineCore(scheduler, InProcessExecutor(Worker(runner, None)), hash_key=PUBLIC_KEY)


def _decode(
    engine: EngineCore, wake: threading.Event, batch: int, num_tokens: int, form: StructuredOutputParams | None
) -> float:
    """The median time of a step in which the whole batch decodes."""
    for index in range(batch):
        prompt = random.Random(index).choices(range(300, 2000), k=32)
        params = SamplingParams(
            temperature=0.8, seed=index, max_tokens=num_tokens, ignore_eos=form is None, structured_output=form
        )
        engine.submit(EngineCoreRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=params))
    seconds: list[float] = []
    while engine.scheduler.has_requests() or not seconds:
        is_full = engine.scheduler.get_request_counts() == (batch, 0)
        wake.clear()
        began_s = time.perf_counter()
        is_idle = engine.step().is_idle
        if is_full:
            seconds.append(time.perf_counter() - began_s)
        if is_idle and engine.scheduler.has_requests():
            assert wake.wait(60.0), "no grammar was compiled"
    return statistics.median(seconds)


def _parts(model: Path) -> Table:
    config = ModelConfig(model=str(model), device="cpu")
    small = load_vocabulary(Path(config.model), 4096, (2,))
    table = Table("part", "4096 tokens", f"{_NUM_LARGE} tokens", title="median, by itself")
    columns = [_measure(vocabulary) for vocabulary in (small, _enlarge(small))]
    for name in columns[0]:
        table.add_row(name, *(_in_words(column[name]) for column in columns))
    return table


def _enlarge(small: Vocabulary) -> Vocabulary:
    """Further tokens are put together of two."""
    texts = small.tokens.decoded_vocab
    rng = random.Random(0)
    texts += [rng.choice(texts[300:]) + rng.choice(texts[300:]) for _ in range(_NUM_LARGE - len(texts))]
    tokens = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=_NUM_LARGE, stop_token_ids=[2])
    return Vocabulary(tokens, TokenTexts(texts, _NUM_LARGE // 32))


def _measure(vocabulary: Vocabulary) -> dict[str, float]:
    texts = vocabulary.tokens.decoded_vocab
    compiler = CompilerProcess(GrammarConfig())
    serialized: list[str] = []

    def compile_person() -> None:
        serialized.append(compiler.compile(_PERSON, vocabulary.tokens.serialize_json))

    parts = {"start a compiler, and compile": _seconds(compile_person, 1), "compile": _seconds(compile_person, 5)}
    compiler.close()
    parts["read a compiled grammar"] = _seconds(lambda: deserialize_grammar(serialized[0], vocabulary), 5)
    compiled = deserialize_grammar(serialized[0], vocabulary)
    bits = np.zeros((1, vocabulary.tokens.vocab_size // 32), dtype=np.int32)
    matcher = TokenMatcher(compiled, vocabulary.texts, is_json=True, max_seconds_per_token=1.0)
    fills, accepts = [], []
    for character in _ANSWER.encode():
        fills.append(_seconds(lambda: matcher.fill(bits, 0), 1))
        accepts.append(_seconds(partial(matcher.accept, [texts.index(bytes([character]))]), 1))
    parts["one request's mask, median"], parts["one request's mask, worst"] = statistics.median(fills), max(fills)
    parts["follow one token"] = statistics.median(accepts)
    for num_rows in (1, 16):
        logits = torch.zeros(num_rows, vocabulary.tokens.vocab_size)
        masks = bits.repeat(num_rows, axis=0)
        parts[f"apply masks to {num_rows} rows"] = _seconds(partial(forbid_unmasked, logits, masks), 20)
    return parts


def _seconds(call: Callable[[], object], count: int) -> float:
    seconds: list[float] = []
    for _ in range(count):
        began_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def _in_words(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


if __name__ == "__main__":
    typer.run(run)
