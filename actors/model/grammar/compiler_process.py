"""The engine's end of a process that compiles grammars."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Final

from actors.config import GrammarConfig
from actors.core.requests.sampling_params import StructuredOutputParams
from actors.model.grammar.errors import CompilerUnusable, GrammarRefused, GrammarTooLarge, GrammarTooSlow
from actors.process.bounded_process import BoundedProcess, ProcessDied, ProcessLimits, ProcessTooSlow, ProcessUnusable

COMPILED: Final = b"c"
REFUSED: Final = b"r"
TOO_LARGE: Final = b"l"
_CHILD: Final = (sys.executable, "-m", "actors.model.grammar.compiler_child")


class CompilerProcess:
    """A process that compiles grammars. It starts with the first grammar, and again after it has ended.

    One thread at a time may call compile(); any thread may call close().
    """

    def __init__(self, config: GrammarConfig, command: Sequence[str] = _CHILD) -> None:
        """command: the program to run; it gets the arguments that compiler_child.py describes."""
        self._timeout_s = config.compile_timeout_s
        limits = ProcessLimits(config.compile_timeout_s, config.compile_memory_mib, config.max_compiled_mib)
        self._process = BoundedProcess(command, [str(config.max_whitespace)], limits, "compiles grammars")

    def compile(self, params: StructuredOutputParams, vocabulary: Callable[[], str]) -> str:
        """Return the compiled grammar, serialized.

        vocabulary: returns the serialized vocabulary, which the process gets when it starts
        Raises GrammarRefused if the grammar is wrong, or takes too much time or memory; CompilerUnusable if the process
        does not start, or if this object is closed.
        """
        task = json.dumps([params.kind, params.value]).encode()
        try:
            answer = self._process.ask(task, lambda: vocabulary().encode())
        except ProcessTooSlow as error:
            raise GrammarTooSlow(f"it takes longer than {self._timeout_s:g} s to compile") from error
        except ProcessDied as error:
            raise GrammarTooLarge("it is too large, or takes too much memory, to compile") from error
        except ProcessUnusable as error:
            raise CompilerUnusable(str(error)) from error
        kind, text = answer[:1], answer[1:].decode()
        if kind != COMPILED:
            raise GrammarTooLarge(text) if kind == TOO_LARGE else GrammarRefused(text)
        return text

    def close(self) -> None:
        """End the process. A thread that waits in compile() gets CompilerUnusable at once."""
        self._process.close()
