"""Uses of the clients that mypy accepts, and others that it must not. Nothing here runs: `make check` is the test.

An error that mypy no longer finds makes its `type: ignore` unused, which is an error in turn.
"""

from __future__ import annotations

from typing import assert_type

from cluster.api.protos.raypd.v1 import admin_pb2, generate_pb2
from cluster.client import Answer, BlockingClient, GenerateClient


async def _async_uses(client: GenerateClient) -> None:
    async for response in client.generate("text", max_tokens=4, stop=["a"], logit_bias={3: 1.0}, timeout_s=None):
        assert_type(response, generate_pb2.GenerateResponse)
        assert_type(response.text, str)
    assert_type(await client.complete([1, 2, 3], priority=-1), Answer)
    assert_type(await client.complete_many(["a", [("user", "b")]], temperature=0.0), list[Answer])
    assert_type(await client.complete_batch(["a", [1, 2]], n=2, best_of=3, seed=1), list[list[Answer]])
    assert_type(await client.status(), admin_pb2.GetStatusResponse)


def _blocking_uses(client: BlockingClient) -> None:
    for response in client.chat([("system", "Be brief."), ("user", "hi")], seed=3):
        assert_type(response, generate_pb2.GenerateResponse)
    for one in client.generate_batch(["a", "b"], n=2, temperature=1.0):
        assert_type(one, generate_pb2.GenerateBatchResponse)
    assert_type(client.complete("text").token_ids, tuple[int, ...])
    assert_type(client.scale(decode=2), list[str])


async def _mistakes(client: GenerateClient, blocking: BlockingClient) -> None:
    client.generate("text", temprature=1.0)  # type: ignore[call-arg]  # no such parameter
    client.generate("text", max_tokens="many")  # type: ignore[arg-type]  # not a number
    client.chat("text")  # type: ignore[arg-type]  # no conversation
    client.generate_batch(["a"], output_token_ids=[1])  # type: ignore[call-arg]  # of one sample alone
    await client.complete(["a", "b"])  # type: ignore[arg-type]  # several prompts
    blocking.complete("text", stop=3)  # type: ignore[arg-type]  # not a text
    blocking.complete_many("text", max_concurrent=1.5)  # type: ignore[arg-type]  # not whole
