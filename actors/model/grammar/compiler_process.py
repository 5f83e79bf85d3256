"""The engine's end of a process that compiles grammars."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Final

from actors.config import GrammarConfig
from actors.core.sampling_params import StructuredOutputParams
from actors.model.grammar.errors import CompilerUnusable, GrammarRefused

logger = logging.getLogger(__name__)

COMPILED: Final = b"c"
REFUSED: Final = b"r"
_CHILD: Final = (sys.executable, "-m", "actors.model.grammar.compiler_child")
_START_TIMEOUT_S: Final = 60.0
_END_TIMEOUT_S: Final = 10.0


class CompilerProcess:
    """Starts when it is first needed, and again after it was ended. One thread at a time compiles; any may close."""

    def __init__(self, config: GrammarConfig, command: Sequence[str] = _CHILD) -> None:
        """command: what to run, with the arguments of compiler_child.py"""
        self._config = config
        self._command = command
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_closed = False

    def compile(self, params: StructuredOutputParams, vocabulary: Callable[[], str]) -> str:
        """Return the compiled grammar, serialized.

        vocabulary: serializes it; the process is given it when it starts
        Raises GrammarRefused if the grammar is wrong or takes too much, CompilerUnusable if the process does not start
        or this object is closed.
        """
        connection = self._connection or self._start(vocabulary)
        timeout_s = self._config.compile_timeout_s
        try:
            connection.send_bytes(json.dumps([params.kind, params.value]).encode())
            if not connection.poll(timeout_s):
                raise GrammarRefused(f"it takes longer than {timeout_s:g} s to compile")
            answer = connection.recv_bytes(self._config.max_compiled_mib << 20)
        except GrammarRefused:
            self._end()
            raise
        except (EOFError, OSError) as error:
            self._end()
            if self._is_closed:
                raise CompilerUnusable("the engine ends") from error
            raise GrammarRefused("it is too large, or takes too much memory, to compile") from error
        text = answer[1:].decode()
        if answer[:1] != COMPILED:
            raise GrammarRefused(text)
        return text

    def close(self) -> None:
        """End the process; whoever waits for it is told at once."""
        self._is_closed = True
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait(_END_TIMEOUT_S)

    def _start(self, vocabulary: Callable[[], str]) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        arguments = [theirs.fileno(), self._config.compile_memory_mib << 20, self._config.max_whitespace]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with self._lock:
            if self._is_closed:
                raise CompilerUnusable("the engine ends")
            self._process = subprocess.Popen(
                [*self._command, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                # It writes warnings about what strangers send.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = ours
        theirs.close()
        try:
            ours.send_bytes(vocabulary().encode())
            is_ready = ours.poll(_START_TIMEOUT_S) and ours.recv_bytes() == b""
        except (EOFError, OSError):
            is_ready = False
        if not is_ready:
            self._end()
            raise CompilerUnusable("the process that compiles grammars does not start")
        logger.info("a process compiles grammars", extra={"pid": self._process.pid})
        return ours

    def _end(self) -> None:
        """By whoever compiles."""
        with self._lock:
            process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait(_END_TIMEOUT_S)
