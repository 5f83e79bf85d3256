"""The ingress's side of the processes that prepare images for the model."""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from actors.core.requests.multimodal import ProcessedImage
from actors.process.bounded_process import BoundedProcess, ProcessDied, ProcessLimits, ProcessTooSlow, ProcessUnusable
from cluster.images.errors import ImageRefused, ImagesUnavailable
from cluster.settings.images import ImageConfig

logger = logging.getLogger(__name__)

PROCESSED: Final = b"p"
REFUSED: Final = b"r"
_CHILD: Final = (sys.executable, "-m", "cluster.images.processor_child")


class ChildGreeting(msgspec.Struct, frozen=True):
    """The first message to a process. directory: the checkpoint's; for the other fields see ImageConfig"""

    directory: str
    max_pixels: int
    formats: tuple[str, ...]


class ImageProcessors:
    """Processes images in other processes, which are ended when they take too much time or memory."""

    def __init__(self, directory: Path, config: ImageConfig, command: Sequence[str] = _CHILD) -> None:
        """Prepare the processes. directory: the checkpoint's; command: the program, called as processor_child.py is"""
        self._config = config
        self._greeting = msgspec.json.encode(ChildGreeting(str(directory), config.max_pixels, config.formats))
        limits = ProcessLimits(config.timeout_s, config.memory_mib, config.max_input_mib + 1)
        self._processes = [BoundedProcess(command, (), limits, "prepares images") for _ in range(config.num_processors)]
        self._idle: queue.SimpleQueue[BoundedProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        # There are as many threads as processes, so that each thread finds an idle process.
        self._threads = ThreadPoolExecutor(config.num_processors, thread_name_prefix="images")

    async def process(self, data: bytes) -> ProcessedImage:
        """Process one image, when a process is idle. Raises ImageRefused or ImagesUnavailable."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._process, data)
        except RuntimeError as error:
            # The pool of threads was closed.
            raise ImagesUnavailable(str(error)) from error

    def close(self) -> None:
        """End the processes; calls of process() under way fail at once."""
        for process in self._processes:
            process.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _process(self, data: bytes) -> ProcessedImage:
        """Process one image; called on a thread."""
        process = self._idle.get_nowait()
        try:
            answer = process.ask(data, lambda: self._greeting)
        except ProcessTooSlow as error:
            raise ImageRefused(f"it takes longer than {self._config.timeout_s:g} s to process") from error
        except ProcessDied as error:
            raise ImageRefused("it takes too much memory to process, or the decoder fails on it") from error
        except ProcessUnusable as error:
            logger.exception("images cannot be processed")
            raise ImagesUnavailable(str(error)) from error
        finally:
            self._idle.put(process)
        if answer[:1] != PROCESSED:
            raise ImageRefused(answer[1:].decode())
        return msgspec.msgpack.decode(answer[1:], type=ProcessedImage)
