"""`raypd serve` with internal_tls: true, as a user starts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from cluster.client import GenerateClient
from tests.integration.serve.cluster import config
from tests.integration.served import ServeProcess, actor_processes, ask_processes
from tests.patience import TEST_S
from tests.reference import greedy_tokens, random_prompt

pytestmark = [pytest.mark.more, pytest.mark.ray, pytest.mark.timeout(TEST_S)]

_NUM_TOKENS = 8


async def test_a_cluster_with_tls_inside_answers_and_no_key_is_in_arguments_or_environments(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    directory, prompt = checkpoint("llama"), random_prompt(40)
    key_file = tmp_path / "block-hashes"
    key_file.write_text("5a" * 32)
    key_file.chmod(0o600)
    settings = config(directory) | {"internal_tls": True, "block_hash_key_file": str(key_file), "ingress": {"count": 1}}
    process = ServeProcess(settings, tmp_path)
    try:
        async with GenerateClient(process.wait_until_ready()) as client:
            answer = client.generate(prompt, max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
            token_ids = [token_id async for response in answer for token_id in response.token_ids]
            addresses = [engine.address for engine in (await client.status()).engines]
        assert token_ids == greedy_tokens(directory, tuple(prompt), _NUM_TOKENS)

        for address in addresses:
            async with grpc.aio.insecure_channel(address) as channel:
                call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/any/Method")
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(b"", timeout=60)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, "plain text gets no answer at all"
        assert len(actor_processes("EngineActor")) == 2
        asked = ask_processes(lambda one: [*one.cmdline(), *one.environ().values()])
        told = " ".join(word for _, words in asked for word in words)
        assert "PRIVATE KEY" not in told
        assert "5a" * 32 not in told
        assert process.stop() == 0, "\n".join(process.lines)
    finally:
        process.kill_if_alive()
