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
"""How long cancelled tasks may take to end."""


class LoopClosed(RuntimeError):
    """The thread is closed: it runs nothing any more."""


class LoopThread:
    """A thread with an event loop. run() may be called from any thread, also from several at the same time.

    Invariant: when run() returns or raises, its coroutine has ended, also if a signal interrupted the wait. (A
    cancelled coroutine that does not end within 5 s is left behind.)
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
        """Run a coroutine on the event loop, and return or raise what the coroutine does.

        KeyboardInterrupt is raised once the coroutine is cancelled and has ended. Raises LoopClosed if the thread is
        closed already, concurrent.futures.CancelledError if it is closed before the coroutine has ended, RuntimeError
        if the caller runs on this very thread.
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
            else:  # The signal came before begin() was scheduled; otherwise begin() would have run before stop().
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
        """Run a coroutine that cleans up, from any thread.

        A stream without references is closed by the thread that collects it, which may be this very thread: then the
        coroutine is scheduled and not waited for. Once the thread is closed, the coroutine is dropped.
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
        """Cancel all tasks, close all async generators, run the coroutine of `last`, and end the thread.

        Only the first call does anything. It waits up to 10 s for the thread, unless it is made on the thread itself.
        """
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
    """Wait up to 5 s for a cancelled coroutine to end; further Ctrl-C does not interrupt the wait."""
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
