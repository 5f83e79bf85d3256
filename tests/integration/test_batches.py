"""GenerateBatch as its clients call it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.api.protos.raypd.v1 import generate_pb2 as raypd
from cluster.api.protos.raypd.v1.generate_pb2_grpc import GenerateServiceStub
from cluster.requests.serving import Serving
from tests.cluster.serving_setup import make_ingress_server, make_pair
from tests.integration.promises import engines_config
from tests.integration.recovering_cluster import RecoveringCluster, recovering_cluster

CheckpointOf = Callable[[str], Path]
_PAGE = Path(__file__).parents[2] / "docs" / "requests.md"


@asynccontextmanager
async def listening(serving: Serving) -> AsyncIterator[str]:
    server = make_ingress_server(serving)
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.drain(grace_s=0)


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[tuple[RecoveringCluster, str]]:
    async with recovering_cluster(engines_config(directory), ["prefill-0", "decode-0"]) as cluster:
        await cluster.join("prefill-0", "decode-0")
        async with listening(cluster.serving) as address:
            yield cluster, address


async def test_the_example_of_its_page_runs(checkpoint: CheckpointOf, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = re.findall(r"^```python\n(.*?)^```$", _PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    async with served(checkpoint("llama")) as (cluster, address):
        namespace: dict[str, Any] = {}
        source = block.replace("127.0.0.1:50051", address).replace("asyncio.run(main())", "")
        exec(compile(source, _PAGE.name, "exec"), namespace)
        await asyncio.wait_for(namespace["main"](), 60)
        lines = capsys.readouterr().out.splitlines()
        rows = sorted(re.fullmatch(r"([01] [012]) .* -\d+\.\d", line).group(1) for line in lines)  # type: ignore[union-attr]  # then it fails
        assert rows == ["0 0", "0 1", "0 2", "1 0", "1 1", "1 2"]
        await cluster.until_idle()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "prompts is empty"),
        ({"prompts": [raypd.Prompt()]}, r"prompts\[0\] is empty; allowed: one of"),
        ({"prompts": [raypd.Prompt(text="x")], "n": 0}, "n is 0; allowed: 1 to 32"),
        ({"prompts": [raypd.Prompt(text="x")], "n": 2**32 - 1}, "n is 4294967295; allowed: 1 to 32"),
        ({"prompts": [raypd.Prompt(text="x")] * 300}, "prompts is 300 samples; allowed: at most 256"),
        ({"each": raypd.GenerateRequest(text="x")}, "each is a request with a prompt"),
    ],
)
async def test_bad_batches_are_refused(fields: dict[str, Any], said: str) -> None:
    async with listening(make_pair().serving) as address, grpc.aio.insecure_channel(address) as channel:
        call = GenerateServiceStub(channel).GenerateBatch(raypd.GenerateBatchRequest(**fields))
        with pytest.raises(grpc.aio.AioRpcError, match=said) as raised:
            await asyncio.wait_for(call.read(), 60)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_cancelled_batch_leaves_nothing(checkpoint: CheckpointOf) -> None:
    async with served(checkpoint("llama")) as (cluster, address), grpc.aio.insecure_channel(address) as channel:
        each = raypd.GenerateRequest(sampling_params=raypd.SamplingParams(max_tokens=200, ignore_eos=True))
        request = raypd.GenerateBatchRequest(prompts=[raypd.Prompt(text="hello")], n=4, each=each)
        call = GenerateServiceStub(channel).GenerateBatch(request)
        seen: set[int] = set()
        while len(seen) < 4:
            response = await asyncio.wait_for(call.read(), 60)
            assert isinstance(response, raypd.GenerateBatchResponse)
            seen.add(response.sample_index)
        call.cancel()
        await cluster.until_idle()
