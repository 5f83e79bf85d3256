"""Rank 0's end of the connections to the further ranks: it sends steps and collects the results.

A thread for each further rank reads the rank's messages. The engine thread sends messages, and waits for answers until
a deadline. A rank is lost when its connection ends or when it reports a failure. Then the engine has to end: callers
that wait and an idle engine thread are woken at once, and every later call raises RankLost with the reason.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.model.errors import RankLost
from actors.ranks.rank_messages import (
    CODEC,
    RankConnection,
    RankFailed,
    RankReady,
    RankRefusals,
    RankSecrets,
    RankStep,
    RankStop,
    RankTrusts,
    RankWoke,
)
from kv_transfer.errors import OtherParty, Untrusted
from kv_transfer.trust.callers import BACKLOG, PROOF_TIMEOUT_S, Caller, Callers
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Member, TrustMaterial
from kv_transfer.trust.refusals import Refusals
from kv_transfer.trust.secret import Purpose

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.1
"""Seconds between two checks whether a rank that has not connected yet is lost."""
_EXPLANATION_TIMEOUT_S = 1.0


class _Lost:
    """The last entry in a rank's queue: the rank is lost."""


class RankHub:
    """The connections from rank 0 to the further ranks."""

    def __init__(
        self,
        host: str,
        num_further_ranks: int,
        timeout_s: float,
        on_progress: Callable[[], None],
        member: Member,
        refusals: Refusals | None = None,
    ) -> None:
        """Listen for ranks on a free port of host.

        timeout_s: how long a rank may take to finish a step after rank 0 has finished it
        on_progress: called on a reader's thread when a step is due, or when a rank is lost
        member: the engine's name and secrets; the hub proves itself with them, and sends new secrets to the ranks
        refusals: counts the callers that did not prove themselves
        """
        self._member = member
        self._refusals = refusals or Refusals()
        self._server = socket.create_server((host, 0), backlog=BACKLOG)
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._num_further_ranks = num_further_ranks
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._connections: dict[int, RankConnection] = {}
        self._answers: dict[int, queue.SimpleQueue[RankReady | RankStep | _Lost]] = {}
        self._readers: list[threading.Thread] = []
        self._failure: str | None = None
        self._has_failed = threading.Event()
        self._lock = threading.Lock()
        """Guards the maps by rank, which grow while ranks connect."""
        self._is_closing = False
        self._generation = member.trust.generation
        """The oldest generation of secrets that a rank may have been started with."""
        for rank in range(1, num_further_ranks + 1):
            member.trust.note_other(f"rank {rank}", self._generation)
        member.trust.follow(self._pass_on)

    def accept_all(self, timeout_s: float, find_lost: Callable[[], str | None]) -> None:
        """Wait until every further rank has connected. Raises RankLost.

        find_lost: returns why some rank will never connect, or None
        """
        deadline_s = time.monotonic() + timeout_s
        with Callers({self._server: self._hear}) as callers:
            while len(self._connections) < self._num_further_ranks:
                if (lost := find_lost()) is not None:
                    raise RankLost(lost)
                if time.monotonic() > deadline_s:
                    missing = sorted(set(range(1, self._num_further_ranks + 1)) - self._connections.keys())
                    raise RankLost(f"ranks {missing} did not start within {timeout_s:g} s")
                with contextlib.suppress(TimeoutError):
                    caller = callers.take(time.monotonic() + _LOOK_INTERVAL_S)
                    if caller is None:
                        raise RankLost("the socket that ranks connect to was shut down")
                    self._welcome(*caller.who)
        self._server.close()

    def broadcast(self, scheduler_output: SchedulerOutput) -> None:
        """Give a step to every further rank. Raises RankLost."""
        if self._failure is not None:
            raise RankLost(self._failure)
        self._send_to_all(scheduler_output)

    def collect_steps(self) -> list[RankStep]:
        """Return the further ranks' results, by rank, of the oldest step not yet collected. Raises RankLost."""
        answers = [self._next_answer(rank, self._timeout_s) for rank in sorted(self._answers)]
        steps = [answer for answer in answers if isinstance(answer, RankStep)]
        assert len(steps) == len(answers), "ranks answer steps with steps"
        return steps

    def collect_ready(self, timeout_s: float) -> list[RankReady]:
        """Wait until each further rank is ready to serve. Raises RankLost."""
        answers = [self._next_answer(rank, timeout_s) for rank in sorted(self._answers)]
        ready = [answer for answer in answers if isinstance(answer, RankReady)]
        assert len(ready) == len(answers), "the first answer of a rank is RankReady"
        return ready

    def explain(self, error: RankLost) -> RankLost:
        """Return RankLost with the reason that the lost rank gave, or else the given error.

        A forward pass knows only that a socket broke; the lost rank's reason may come up to a second later.
        """
        self._has_failed.wait(_EXPLANATION_TIMEOUT_S)
        return RankLost(self._failure) if self._failure is not None else error

    def close(self) -> None:
        """Tell every rank to end, and close the connections."""
        with self._lock:
            self._is_closing = True
        self._server.close()
        try:
            self._send_to_all(RankStop())
        except RankLost as error:
            logger.info("a rank ended before it was told to stop", extra={"reason": str(error)})
        for connection in self._connections.values():
            connection.hang_up()
        for reader in self._readers:
            reader.join(self._timeout_s)

    def _hear(self, peer: socket.socket, address: str) -> Caller[tuple[Party, RankConnection]] | None:
        """Let a caller prove that it is a rank of this engine. Runs on a thread for this caller."""
        connection = RankConnection(peer, self._timeout_s)
        try:
            stream, party = connection.identify(self._member, PROOF_TIMEOUT_S)
            self._rank_of(party)
            return Caller(stream, (party, connection))
        except Untrusted as error:
            self._refusals.add(Purpose.RANK, address, error)
            connection.close()
            return None

    def _welcome(self, caller: Party, connection: RankConnection) -> None:
        with self._lock:
            rank = self._rank_of(caller)
            if rank in self._connections:
                # Either the rank did not get the hub's answer and calls again, or another process has the secret.
                connection.close()
                return
            reader = threading.Thread(target=self._read, args=(rank, connection), name=f"rank-{rank}", daemon=True)
            self._answers[rank] = queue.SimpleQueue()
            self._readers.append(reader)
            self._connections[rank] = connection
            reader.start()
        material = self._member.trust.material
        if material is not None and material.generation > self._generation:
            self._pass_on_to(connection, material)

    def _rank_of(self, caller: Party) -> int:
        """Return which rank the caller is. Raises OtherParty if it is no rank of this engine."""
        engine_id, _, number = caller.name.rpartition("/")
        own = self._member.party
        expected = {str(rank): rank for rank in range(1, self._num_further_ranks + 1)}
        rank = expected.get(number)
        if rank is None or (engine_id, caller.incarnation) != (own.name, own.incarnation):
            raise OtherParty(f"{caller} is not a rank of {own}")
        return rank

    def _pass_on(self, material: TrustMaterial) -> None:
        """Send the cluster's new secrets to every connected rank. Other ranks get them when they connect."""
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            self._pass_on_to(connection, material)

    @staticmethod
    def _pass_on_to(connection: RankConnection, material: TrustMaterial) -> None:
        try:
            connection.send(RankSecrets.of(material))
        except RankLost as error:
            logger.info("a rank ended before it received the new secrets", extra={"reason": str(error)})

    def _send_to_all(self, message: SchedulerOutput | RankStop) -> None:
        encoded = CODEC.encode(message)
        for rank, connection in self._connections.items():
            try:
                connection.send_encoded(encoded)
            except RankLost as error:
                raise RankLost(f"rank {rank}: {error}") from error

    def _next_answer(self, rank: int, timeout_s: float) -> RankReady | RankStep:
        try:
            answer = self._answers[rank].get(timeout=timeout_s)
        except queue.Empty:
            raise RankLost(f"rank {rank} did not answer within {timeout_s:g} s") from None
        if isinstance(answer, _Lost):
            self._answers[rank].put(answer)  # A later call needs this answer too.
            raise RankLost(self._failure or f"rank {rank} is lost")
        return answer

    def _read(self, rank: int, connection: RankConnection) -> None:
        try:
            while True:
                message = connection.receive()
                if isinstance(message, RankReady | RankStep):
                    self._answers[rank].put(message)
                elif isinstance(message, RankTrusts):
                    self._member.trust.note_other(f"rank {rank}", message.generation)
                elif isinstance(message, RankRefusals):
                    self._refusals.note_total(f"rank {rank}", message.total)
                elif isinstance(message, RankWoke):
                    self._on_progress()
                elif isinstance(message, RankFailed):
                    raise RankLost(message.reason)
                else:
                    raise RankLost(f"it sent a message that only rank 0 may send: {type(message).__name__}")
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
