"""The examples of docs/api.md's gRPC half run as they are, but for the address."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.cluster.api.grpc.answering import AnsweringEngine
from tests.cluster.serving_setup import make_ingress_server, make_serving

_DOCUMENT = Path(__file__).parents[4] / "docs" / "api.md"
_OUTPUTS = [
    ["0 a", "1 b", "17 2"],
    ["INVALID_ARGUMENT", "sampling_params.top_p | sampling_params.top_p is 2.0; allowed: more than 0, at most 1"],
    ["tiny"],
    [
        "[104, 101, 108, 108, 111] of 64",
        "hello",
        "raypd.v1.GenerateService SERVING",
        "raypd.role.prefill SERVING",
    ],
]


def _blocks() -> list[str]:
    half = _DOCUMENT.read_text(encoding="utf-8").partition("\n## gRPC\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", half, re.MULTILINE | re.DOTALL)


@pytest.fixture
def address() -> Iterator[str]:
    """The address of an ingress in a thread of its own: the examples have event loops of theirs."""
    started: Future[str] = Future()
    loop = asyncio.new_event_loop()
    is_over = asyncio.Event()

    async def serve() -> None:
        server = make_ingress_server(make_serving(AnsweringEngine()))
        started.set_result(f"127.0.0.1:{await server.start()}")
        await is_over.wait()
        await server.drain(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    yield started.result(timeout=60)
    loop.call_soon_threadsafe(is_over.set)
    thread.join(timeout=60)
    loop.close()


@pytest.mark.parametrize("number", range(len(_OUTPUTS)))
def test_an_example_does_what_the_page_says(number: int, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    block = _blocks()[number].replace("127.0.0.1:50051", address).replace("raypd-…", "raypd-x")
    exec(compile(block, f"{_DOCUMENT.name}, example {number}", "exec"), {})
    assert capsys.readouterr().out.splitlines() == _OUTPUTS[number]


def test_every_example_is_run() -> None:
    assert len(_blocks()) == len(_OUTPUTS)
