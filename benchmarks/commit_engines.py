"""The engines of one commit, for benchmarks.between_commits: a prefill and a decode engine in this process.

Reads names of measurements from standard input, a line each, and prints the figures of each as a line of JSON.
Everything but this file is imported from the commit's own tree, so it uses only what earlier commits have as well.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

import torch

from actors.core.requests.sampling_params import SamplingParams
from cluster.config import DEMO_MODEL
from tests.engine_pair import EnginePair, engine_config

_BATCH: Final = 16
_CONTEXT_TOKENS: Final = 384
_NUM_STEPS: Final = 40
_NUM_HANDOFFS: Final = 8
_HANDOFF_TOKENS: Final = 512
_CHUNK_TOKENS: Final = 256


def main() -> None:
    """Answer until standard input ends."""
    torch.set_num_threads(1)
    config = engine_config(DEMO_MODEL, num_blocks=1024, max_num_seqs=_BATCH, max_num_batched_tokens=_CHUNK_TOKENS)
    with EnginePair(config, config) as pair:
        prompts = _prompts()
        for line in sys.stdin:
            figures = _MEASUREMENTS[line.strip()](pair, prompts)
            sys.stdout.write(json.dumps(figures) + "\n")
            sys.stdout.flush()


def _decode(pair: EnginePair, prompts: Iterator[tuple[str, list[int]]]) -> dict[str, float]:
    """A full batch decodes."""
    core = pair.engines["decode"]
    for _ in range(_BATCH):
        name, prompt = next(prompts)
        pair.submit("decode", name, prompt[:_CONTEXT_TOKENS], _greedy(_NUM_STEPS + 8))
    while core.scheduler.get_request_counts() != (_BATCH, 0) or any(
        request.num_output_tokens == 0 for request in core.scheduler.running
    ):
        core.step()
    seconds, cpu_s = [], []
    for _ in range(_NUM_STEPS):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        core.step()
        seconds.append(time.perf_counter() - began_s)
        cpu_s.append(time.process_time() - began_cpu_s)
    while core.scheduler.has_requests():
        core.step()
    return {"decode step, ms": _median_ms(seconds), "decode step, CPU ms": _median_ms(cpu_s)}


def _hand_over(pair: EnginePair, prompts: Iterator[tuple[str, list[int]]]) -> dict[str, float]:
    """Prompts of two chunks are handed over, one after the other, and get two tokens each."""
    seconds, cpu_s = [], []
    for _ in range(_NUM_HANDOFFS):
        name, prompt = next(prompts)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        pair.hand_over(name, prompt, _greedy(2))
        while not pair.answers[name].is_finished or any(e.scheduler.has_requests() for e in pair.engines.values()):
            _step(pair)
        seconds.append(time.perf_counter() - began_s)
        cpu_s.append(time.process_time() - began_cpu_s)
    sent = pair.engines["prefill"].make_stats().transfer_stats
    assert sent is not None
    assert sent.num_sent_blocks, "the prompts were handed over"
    return {"handoff of 512 tokens, ms": _median_ms(seconds), "handoff of 512 tokens, CPU ms": _median_ms(cpu_s)}


def _step(pair: EnginePair) -> None:
    """Step both engines, as EnginePair.step() does without its checks."""
    pair._wake.clear()
    results = {name: core.step() for name, core in pair.engines.items()}
    for name, result in results.items():
        for batch in result.outputs.values():
            for output in batch.outputs:
                pair.answers[output.request_id].take(name, output)
    if all(result.is_idle for result in results.values()):
        pair._wake.wait(0.1)


_MEASUREMENTS: Final[dict[str, Callable[[EnginePair, Iterator[tuple[str, list[int]]]], dict[str, float]]]] = {
    "decode": _decode,
    "handoffs": _hand_over,
}


def _prompts() -> Iterator[tuple[str, list[int]]]:
    """Yield names and prompts; nothing of a prompt is cached."""
    draw, number = random.Random(1), 0
    while True:
        number += 1
        yield f"r{number}", draw.choices(range(3, 2000), k=_HANDOFF_TOKENS)


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


if __name__ == "__main__":
    main()
