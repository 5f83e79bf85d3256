"""Rank 0's end: steps go out to the further ranks, what they computed comes back.

A thread for each further rank reads what it says. The engine thread sends, and collects answers up to a deadline. A
rank whose connection ends, or who says that it failed, is lost, and with it the engine: whoever waits is woken at once,
also an idle engine thread, and every later call raises RankLost with the reason.
"""

from __future__ import annotations

import logging
import pickle
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable

from actors.core.outputs import SchedulerOutput
from actors.model.errors import RankLost
from actors.rank_messages import (
    RankConnection,
    RankFailed,
    RankReady,
    RankStep,
    RankStop,
    RankWoke,
)

logger = logging.getLogger(__name__)

_ACCEPT_INTERVAL_S = 0.5
_EXPLANATION_TIMEOUT_S = 1.0


class _Lost:
    """In a rank's queue: nothing more will come."""


class RankHub:
    """on_progress: called on a reader's thread when a step is due, or when a rank is lost."""

    def __init__(self, host: str, num_further_ranks: int, timeout_s: float, on_progress: Callable[[], None]) -> None:
        """timeout_s: how long a rank may take for its part of a step after rank 0 has done its own."""
        self.secret = secrets.token_bytes(32)
        self._server = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._num_further_ranks = num_further_ranks
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._connections: dict[int, RankConnection] = {}
        self._answers: dict[int, queue.SimpleQueue[RankReady | RankStep | _Lost]] = {}
        self._readers: list[threading.Thread] = []
        self._failure: str | None = None
        self._has_failed = threading.Event()
        self._is_closing = False

    def accept_all(self, timeout_s: float, find_lost: Callable[[], str | None]) -> None:
        """Wait until every further rank has called. find_lost: why one of them never will. Raises RankLost."""
        deadline_s = time.monotonic() + timeout_s
        self._server.settimeout(_ACCEPT_INTERVAL_S)
        while len(self._connections) < self._num_further_ranks:
            if (lost := find_lost()) is not None:
                raise RankLost(lost)
            if time.monotonic() > deadline_s:
                missing = sorted(set(range(1, self._num_further_ranks + 1)) - self._connections.keys())
                raise RankLost(f"ranks {missing} did not start within {timeout_s:g} s")
            try:
                peer, _ = self._server.accept()
            except TimeoutError:
                continue
            self._welcome(peer)
        self._server.close()

    def broadcast(self, scheduler_output: SchedulerOutput) -> None:
        """Give a step to every further rank. Raises RankLost."""
        if self._failure is not None:
            raise RankLost(self._failure)
        self._send_to_all(scheduler_output)

    def collect_steps(self) -> list[RankStep]:
        """What each further rank computed, by rank; the oldest step that was not collected. Raises RankLost."""
        answers = [self._next_answer(rank, self._timeout_s) for rank in sorted(self._answers)]
        steps = [answer for answer in answers if isinstance(answer, RankStep)]
        assert len(steps) == len(answers), "ranks answer steps with steps"
        return steps

    def collect_ready(self, timeout_s: float) -> list[RankReady]:
        """Wait until each further rank is ready to serve. Raises RankLost."""
        answers = [self._next_answer(rank, timeout_s) for rank in sorted(self._answers)]
        ready = [answer for answer in answers if isinstance(answer, RankReady)]
        assert len(ready) == len(answers), "a rank's first word is that it is ready"
        return ready

    def explain(self, error: RankLost) -> RankLost:
        """Inside a forward a lost rank shows as a broken connection; what it said itself is the better reason."""
        self._has_failed.wait(_EXPLANATION_TIMEOUT_S)
        return RankLost(self._failure) if self._failure is not None else error

    def close(self) -> None:
        """Tell every rank to end, and hang up."""
        self._is_closing = True
        self._server.close()
        try:
            self._send_to_all(RankStop())
        except RankLost as error:
            logger.info("a rank was gone before it could be stopped", extra={"reason": str(error)})
        for connection in self._connections.values():
            connection.hang_up()
        for reader in self._readers:
            reader.join(self._timeout_s)

    def _welcome(self, peer: socket.socket) -> None:
        connection = RankConnection(peer, self._timeout_s)
        try:
            rank = connection.identify(self.secret, self._timeout_s)
        except RankLost:
            logger.warning("a stranger called where only ranks of this engine do", exc_info=True)
            connection.close()
            return
        self._connections[rank] = connection
        self._answers[rank] = queue.SimpleQueue()
        reader = threading.Thread(target=self._read, args=(rank, connection), name=f"rank-{rank}", daemon=True)
        self._readers.append(reader)
        reader.start()

    def _send_to_all(self, message: SchedulerOutput | RankStop) -> None:
        pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for rank, connection in self._connections.items():
            try:
                connection.send_pickled(pickled)
            except RankLost as error:
                raise RankLost(f"rank {rank}: {error}") from error

    def _next_answer(self, rank: int, timeout_s: float) -> RankReady | RankStep:
        try:
            answer = self._answers[rank].get(timeout=timeout_s)
        except queue.Empty:
            raise RankLost(f"rank {rank} did not answer within {timeout_s:g} s") from None
        if isinstance(answer, _Lost):
            self._answers[rank].put(answer)  # for whoever asks again
            raise RankLost(self._failure or f"rank {rank} is lost")
        return answer

    def _read(self, rank: int, connection: RankConnection) -> None:
        try:
            while True:
                message = connection.receive()
                if isinstance(message, RankReady | RankStep):
                    self._answers[rank].put(message)
                elif isinstance(message, RankWoke):
                    self._on_progress()
                else:
                    assert isinstance(message, RankFailed), f"not a rank's: {message}"
                    raise RankLost(message.reason)
        except RankLost as error:
            self._lose(rank, str(error))
        finally:
            connection.close()

    def _lose(self, rank: int, reason: str) -> None:
        if self._is_closing:
            return
        if self._failure is None:
            logger.error("a rank is lost", extra={"tp_rank": rank, "reason": reason})
            self._failure = f"rank {rank}: {reason}"
            self._has_failed.set()
        for answers in list(self._answers.values()):
            answers.put(_Lost())
        self._on_progress()
