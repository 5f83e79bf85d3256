"""An event loop on a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

_T = TypeVar("_T")

_END_TIMEOUT_S: Final = 5.0
"""For what was cancelled to come to its end."""


class LoopClosed(RuntimeError):
    """Nothing runs on this thread any more."""


class LoopThread:
    """run() may be called from any thread, also from several at once.

    Invariant: when run() is left, what it ran has ended, also if the wait for it was interrupted by a signal.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._is_closed = False
        self._last: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._left: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run it, and return or raise what it does. KeyboardInterrupt cancels it first.

        Raises LoopClosed once the thread is closed, concurrent.futures.CancelledError if that happens meanwhile.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("this would wait for itself: it runs on the client's own event loop")
        result: concurrent.futures.Future[_T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[_T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda task: _hand_over(task, result))

        def stop() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # begin() would have come first: the interruption was before it was called for.
                coroutine.close()
                result.set_exception(concurrent.futures.CancelledError())

        try:
            with self._lock:
                if self._is_closed:
                    coroutine.close()
                    raise LoopClosed("the client is closed")
                self._loop.call_soon_threadsafe(begin)
            return result.result()
        except BaseException as error:
            is_interruption = not (result.done() or isinstance(error, RuntimeError))
            if is_interruption:
                self._loop.call_soon_threadsafe(stop)
                _wait_undisturbed(result)
            raise

    def finish(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run what cleans up: on this very thread too, where it is not waited for; not at all once it is closed.

        A stream that nobody refers to any more is closed by whichever thread collects it.
        """
        if threading.current_thread() is self._thread:
            task = self._loop.create_task(coroutine)
            self._left.add(task)
            task.add_done_callback(self._left.discard)
        elif self._is_closed:
            coroutine.close()
        else:
            self.run(coroutine)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel what runs, close what streams, do this last thing, end the thread. Only the first call does it."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._last = last
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _END_TIMEOUT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_TIMEOUT_S)
        await self._loop.shutdown_asyncgens()
        assert self._last is not None, "nothing else stops the loop"
        await self._last()


def _wait_undisturbed(result: concurrent.futures.Future[_T]) -> None:
    """Wait for what ends soon, whoever presses Ctrl-C meanwhile."""
    give_up_s = time.monotonic() + _END_TIMEOUT_S
    while not result.done() and time.monotonic() < give_up_s:
        with contextlib.suppress(KeyboardInterrupt):
            concurrent.futures.wait([result], give_up_s - time.monotonic())


def _hand_over(task: asyncio.Task[_T], result: concurrent.futures.Future[_T]) -> None:
    if task.cancelled():
        result.set_exception(concurrent.futures.CancelledError())
    elif (error := task.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(task.result())
