"""The process that compiles grammars: `python -m actors.model.grammar.compiler_child FD MEMORY_BYTES MAX_WHITESPACE`.

A compiler of grammars is given what strangers write. It can take minutes and gigabytes for a few kilobytes, cannot be
interrupted, and may crash; so it lives in a process of its own, which has a memory limit and can be killed.

FD is one end of a connection. First comes the vocabulary, answered by an empty message; then one (kind, value) after
another in JSON, each answered by COMPILED or REFUSED and the compiled grammar or why not. The process ends when the
other end is closed, even while it compiles.
"""

from __future__ import annotations

import json
import os
import queue
import re
import resource
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np
import xgrammar

from actors.model.grammar.compiler_process import COMPILED, REFUSED

_SOURCE_PLACE: Final = re.compile(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ")
_MAX_REASON_CHARS: Final = 500
_NICENESS: Final = 10
"""Below the engine's own threads: on a CPU engine they share the cores."""


def main() -> None:
    """Compile until the other end hangs up."""
    descriptor, memory_bytes, max_whitespace = (int(argument) for argument in sys.argv[1:])
    connection = Connection(descriptor)
    vocabulary = xgrammar.TokenizerInfo.deserialize_json(connection.recv_bytes().decode())
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    os.nice(_NICENESS)
    _limit_memory(memory_bytes)
    connection.send_bytes(b"")
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, tasks), daemon=True).start()
    while True:
        kind, value = json.loads(tasks.get())
        connection.send_bytes(answer(compiler, kind, value, max_whitespace))


def _receive(connection: Connection, tasks: queue.SimpleQueue[bytes]) -> None:
    """Nobody waits for an answer any more once the other end is closed."""
    while True:
        try:
            tasks.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def answer(compiler: xgrammar.GrammarCompiler, kind: str, value: str, max_whitespace: int) -> bytes:
    """Compile one grammar, and say what came of it."""
    try:
        compiled = _compile(compiler, kind, value, max_whitespace)
        if not _has_beginning(compiled):
            return REFUSED + b"no output could be of this form"
        return COMPILED + compiled.serialize_json().encode()
    except (MemoryError, RuntimeError, ValueError, TypeError) as error:
        words = " ".join(_SOURCE_PLACE.sub("", str(error)).split())
        if isinstance(error, MemoryError) or "std::bad_alloc" in words:
            words = "it takes too much memory to compile"
        return REFUSED + words[:_MAX_REASON_CHARS].encode(errors="replace")


def _has_beginning(compiled: xgrammar.CompiledGrammar) -> bool:
    """Whether any token may come first: not, for instance, in a schema that refers to nothing but itself."""
    bits = np.zeros((1, -(-compiled.tokenizer_info.vocab_size // 32)), dtype=np.int32)
    return not xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(bits) or bool(bits.any())


def _compile(
    compiler: xgrammar.GrammarCompiler, kind: str, value: str, max_whitespace: int
) -> xgrammar.CompiledGrammar:
    match kind:
        case "json_schema":
            return compiler.compile_json_schema(value, max_whitespace_cnt=max_whitespace)
        case "json_object":
            return compiler.compile_json_schema(
                '{"type": "object"}', strict_mode=False, max_whitespace_cnt=max_whitespace
            )
        case "regex":
            return compiler.compile_regex(value)
        case "choice":
            # A literal of the grammar's is written like one of JSON.
            literals = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(value)]
            return compiler.compile_grammar("root ::= " + " | ".join(literals))
        case "grammar":
            return compiler.compile_grammar(value)
        case _:
            raise ValueError(f"a grammar of kind {kind!r} is not known")


def _limit_memory(memory_bytes: int) -> None:
    """From here on so much more. Where the system does not tell what is in use, there is only the time limit."""
    usage = Path("/proc/self/statm")
    if usage.exists():
        used_bytes = int(usage.read_text().split()[0]) * resource.getpagesize()
        limit = used_bytes + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
