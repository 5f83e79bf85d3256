"""The process that prepares images may fail in any way: its ingress goes on.

Tests of cluster/images/errors.py, cluster/images/processor_child.py, cluster/settings/images.py.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.images.errors import ImageRefused, ImagesUnavailable
from cluster.images.processor_process import ImageProcessors
from cluster.settings.images import ImageConfig
from tests.vision import ProcessorsInProcess, draw_image, encode_png

_CHILD = """
import os, sys, threading
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
connection.recv_bytes()
connection.send_bytes(b"")
while True:
    task = connection.recv_bytes()
    if b"hang" in task:
        threading.Event().wait()
    if b"die" in task:
        os._exit(1)
    connection.send_bytes(b"r" + str(os.getpid()).encode())
"""


async def refusal(processors: ImageProcessors, data: bytes) -> str:
    with pytest.raises(ImageRefused) as caught:
        await processors.process(data)
    return str(caught.value)


async def test_an_image_that_is_too_much_for_it_is_refused_and_the_next_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = (sys.executable, "-c", _CHILD)
    processors = ImageProcessors(Path("/nowhere"), ImageConfig(timeout_s=60.0), command)
    first = await refusal(processors, b"a")
    assert await refusal(processors, b"b") == first, "it starts once"
    with monkeypatch.context() as patch:
        for process in processors._processes:
            patch.setattr(process, "_limits", replace(process._limits, timeout_s=0.3))
        assert "longer than 60 s" in await refusal(processors, b"hang")
    second = await refusal(processors, b"a")
    assert second != first
    assert "takes too much memory" in await refusal(processors, b"die")
    assert await refusal(processors, b"a") not in (first, second)
    processors.close()
    with pytest.raises(ImagesUnavailable):
        await processors.process(b"a")


async def test_closing_it_ends_whoever_waits() -> None:
    processors = ImageProcessors(Path("/nowhere"), ImageConfig(), (sys.executable, "-c", _CHILD))
    await refusal(processors, b"a")
    waiting = asyncio.create_task(processors.process(b"hang"))
    asyncio.get_running_loop().call_later(0.05, processors.close)
    with pytest.raises(ImagesUnavailable):
        await waiting


async def test_a_process_that_does_not_start_is_no_fault_of_the_image(caplog: pytest.LogCaptureFixture) -> None:
    processors = ImageProcessors(Path("/nowhere"), ImageConfig(), (sys.executable, "-c", "raise SystemExit(1)"))
    with pytest.raises(ImagesUnavailable, match="does not start"):
        await processors.process(b"a")
    assert "images cannot be processed" in caplog.text
    processors.close()


async def test_the_real_process_does_what_it_does_here(checkpoint: Callable[[str], Path]) -> None:
    directory, config = checkpoint("qwen2_5_vl"), ImageConfig(timeout_s=60.0, max_pixels=10_000_000)
    processors = ImageProcessors(directory, config)
    data = encode_png(draw_image(1))
    assert await processors.process(data) == await ProcessorsInProcess(directory, config).process(data)
    assert "at most 10000000" in await refusal(processors, encode_png(draw_image(1, 4_000, 4_000)))
    assert await processors.process(data), "it goes on"
    processors.close()
