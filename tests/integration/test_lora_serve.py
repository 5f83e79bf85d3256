"""Adapters of a running cluster: configured, found, loaded by an operator, replaced, and taken away.

Tests of cluster/pool/adapter_registry.py.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from cluster.client import CallFailed, GenerateClient
from tests.adapters import adapted_tokens, make_adapter
from tests.integration.served import ServeProcess
from tests.patience import CLUSTER_S, TEST_S
from tests.reference import greedy_tokens, random_prompt

pytestmark = [pytest.mark.ray, pytest.mark.more, pytest.mark.timeout(TEST_S)]

NUM_TOKENS = 10
PROMPT = random_prompt(40)


@pytest.fixture(scope="module")
def llama(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("configured", "team/found", "late")):
        make_adapter(llama, root / name, seed=seed)
    make_adapter(llama, root / "newer", seed=7, target_modules=["q_proj", "down_proj"])
    make_adapter(llama, root / "high", seed=8, r=32)
    shutil.copytree(root / "late", root / "broken")
    (root / "broken" / "adapter_model.safetensors").write_bytes(b"nothing")
    return root


@pytest.fixture(scope="module")
def address(llama: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config: dict[str, object] = {
        "model": {"model": str(llama), "dtype": "float32"},
        "served_model_name": "llama",
        "cache": {"num_blocks": 256},
        "parallel": {"num_threads": 1},
        # By cost one engine may serve all of it; here both have to load each adapter.
        "routing": {"mode": "disaggregate"},
        "lora": {"adapters": {"first": str(adapters / "configured")}, "allowed_directories": [str(adapters)]},
    }
    process = ServeProcess(config, tmp_path_factory.mktemp("serve"))
    try:
        yield process.wait_until_ready()
        assert process.stop() == 0, "\n".join(process.lines)
    finally:
        process.kill_if_alive()


async def ask(client: GenerateClient, **names: str) -> tuple[list[int], str]:
    """The tokens, and the digest of the adapter that they were made with."""
    token_ids: list[int] = []
    digest = ""
    async for response in client.generate(
        PROMPT,
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        ignore_eos=True,
        **names,  # type: ignore[arg-type]  # a name is one of the options
    ):
        token_ids.extend(response.token_ids)
        digest = digest or response.lora_digest
    return token_ids, digest


async def test_requests_with_and_without_adapters_share_the_engines(address: str, adapters: Path, llama: Path) -> None:
    async with GenerateClient(address) as client:
        plain, first, as_model, found = await asyncio.gather(
            ask(client), ask(client, lora_name="first"), ask(client, model="first"), ask(client, lora_name="team/found")
        )
        assert plain == (greedy_tokens(llama, tuple(PROMPT), NUM_TOKENS), "")
        assert first[0] == adapted_tokens(llama, adapters / "configured", PROMPT, NUM_TOKENS)
        assert first[1] != ""
        assert as_model == first
        assert found[0] == adapted_tokens(llama, adapters / "team" / "found", PROMPT, NUM_TOKENS)
        known = {adapter.name: adapter.digest for adapter in (await client.get_model()).adapters}
        assert known == {"first": first[1], "team/found": found[1]}
        async with asyncio.timeout(CLUSTER_S):
            # What engines say of themselves comes twice a second.
            while any(set(e.adapters.loaded) != known.keys() for e in (await client.status()).engines):
                pass


async def test_an_operator_loads_an_adapter_replaces_its_weights_and_takes_it_away(
    address: str, adapters: Path, llama: Path
) -> None:
    async with GenerateClient(address) as client:
        for name in ("late", "newer"):
            digest = await client.load_adapter("current", str(adapters / name), timeout_s=60)
            expected = adapted_tokens(llama, adapters / name, PROMPT, NUM_TOKENS)
            assert await ask(client, lora_name="current") == (expected, digest)
        with pytest.raises(CallFailed, match="other weights now"):
            await ask(client, lora_name="current", lora_digest="0123")
        await client.unload_adapter("current")
        with pytest.raises(CallFailed, match="lora_name is 'current'") as gone:
            await ask(client, lora_name="current")
        assert gone.value.code is grpc.StatusCode.NOT_FOUND
        with pytest.raises(CallFailed) as unknown:
            await client.unload_adapter("current")
        assert unknown.value.code is grpc.StatusCode.NOT_FOUND
        decisions = [decision.text for decision in (await client.status()).decisions]
        assert any(text.startswith("load adapter current") for text in decisions)


async def test_what_cannot_be_served_is_refused_with_the_reason(address: str, adapters: Path) -> None:
    async with GenerateClient(address) as client:
        for names, code, reason in (
            (
                {"lora_name": "nobody"},
                grpc.StatusCode.NOT_FOUND,
                "lora_name is 'nobody'; allowed: one of the registered adapters: first",
            ),
            ({"lora_name": "../secret"}, grpc.StatusCode.NOT_FOUND, "lora_name is '../secret'"),
            ({"model": "nobody"}, grpc.StatusCode.NOT_FOUND, "model 'nobody' is not served here"),
            (
                {"lora_name": "high"},
                grpc.StatusCode.INVALID_ARGUMENT,
                "its rank is 32, and lora.max_lora_rank allows 16",
            ),
            ({"lora_name": "broken"}, grpc.StatusCode.INVALID_ARGUMENT, "adapter_model.safetensors is broken"),
        ):
            with pytest.raises(CallFailed) as failed:
                await ask(client, **names)
            assert (failed.value.code, reason in str(failed.value)) == (code, True), str(failed.value)
        with pytest.raises(CallFailed, match=r"prefill-0: adapter 'broken'.* is broken") as refused:
            await client.load_adapter("broken", str(adapters / "broken"), timeout_s=60)
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(CallFailed, match=r"is not in lora\.allowed_directories"):
            await client.load_adapter("outside", "/etc")
        assert await ask(client, lora_name="first"), "the engines live on"
