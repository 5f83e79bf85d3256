"""Images through a whole cluster: gRPC, the real process that works on them, an encode engine, a handoff."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import pytest

from cluster.client import CallFailed, GenerateClient
from tests.integration.served import ServeProcess
from tests.patience import TEST_S
from tests.vision import VisionReference, draw_image, encode_png

pytestmark = [pytest.mark.ray, pytest.mark.more, pytest.mark.timeout(TEST_S)]

_FAMILY = "qwen2_5_vl"
_NUM_TOKENS = 12


def test_a_cluster_with_an_encode_engine_sees(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = checkpoint(_FAMILY)
    engines = {"count": 1, "num_cpus": 0.25}
    config: dict[str, object] = {
        "model": {"model": str(directory), "dtype": "float32", "device": "cpu"},
        "cache": {"num_blocks": 64},
        "parallel": {"num_threads": 1},
        "prefill": engines,
        "decode": engines,
        "encode": engines,
        # Sessions, the call for an encoded image and what it fetches, all inside TLS.
        "internal_tls": True,
    }
    serve = ServeProcess(config, tmp_path)
    try:
        address = serve.wait_until_ready()
        asyncio.run(_ask(address, VisionReference(directory, _FAMILY)))
        assert serve.stop() == 0
    finally:
        serve.kill_if_alive()


async def _ask(address: str, reference: VisionReference) -> None:
    image = draw_image(1)
    question, data = "What is this? ", encode_png(image)
    shown = [{"type": "text", "text": question}, {"type": "image"}]
    prompt = reference.prompt(reference.chat_text([{"role": "user", "content": shown}]), [image])
    expected = reference.greedy(prompt, [image], _NUM_TOKENS)
    async with GenerateClient(address) as client:
        for _ in range(2):
            token_ids: list[int] = []
            async for response in client.generate(
                _turn(question, data), temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True, timeout_s=60.0
            ):
                token_ids += response.token_ids
            assert token_ids == expected
            assert response.timings.prefill_engine.engine_id == "prefill-0"
            assert response.timings.prefill_engine.fetched_images == 1
        for bad in (b"no image", data[:100]):
            with pytest.raises(CallFailed) as caught:
                _ = [response async for response in client.generate(_turn("What? ", bad))]
            assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
            assert "chat.messages[0].parts[1].image" in str(caught.value)
        assert await client.scale(encode=0) == ["decode-0", "prefill-0"]


def _turn(*content: str | bytes) -> list[tuple[str, Sequence[str | bytes]]]:
    return [("user", content)]
