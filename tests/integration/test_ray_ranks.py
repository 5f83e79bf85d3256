"""An engine of two ranks in a cluster as `raypd serve` starts it: the second rank is a Ray actor of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cluster.client import GenerateClient
from tests.integration.served import ServeProcess
from tests.reference import greedy_tokens, random_prompt

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

_NUM_TOKENS = 8


@pytest.fixture
def served(checkpoint: Callable[[str], Path], tmp_path: Path) -> Iterator[tuple[ServeProcess, str]]:
    config: dict[str, object] = {
        "model": {"model": str(checkpoint("llama")), "dtype": "float32"},
        "cache": {"num_blocks": 256},
        "scheduler": {"max_num_batched_tokens": 48, "max_num_seqs": 32},
        "parallel": {"num_threads": 1},
        "decode": {"count": 1, "num_cpus": 0.5, "parallel": {"num_threads": 1, "tensor_parallel_size": 2}},
    }
    process = ServeProcess(config, tmp_path)
    try:
        yield process, process.wait_until_ready()
        assert process.stop() == 0, "\n".join(process.lines)
    finally:
        process.kill_if_alive()


async def test_a_decode_engine_of_two_ranks_takes_over_from_a_prefill_engine_of_one(
    served: tuple[ServeProcess, str], checkpoint: Callable[[str], Path]
) -> None:
    names = [process.name() for process in psutil.Process().children(recursive=True)]
    assert sum("RankActor" in name for name in names) == 1, names
    prompt = random_prompt(60)
    token_ids: list[int] = []
    async with GenerateClient(served[1]) as client:
        async for response in client.generate(prompt, max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True):
            token_ids.extend(response.token_ids)
    assert token_ids == greedy_tokens(checkpoint("llama"), tuple(prompt), _NUM_TOKENS)
    assert response.timings.decode_engine.computed_prompt_tokens == 0
