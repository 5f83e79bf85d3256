"""The process that compiles grammars: `python -m actors.model.grammar.compiler_child FD MEMORY_BYTES MAX_WHITESPACE`.

FD is a file descriptor, one end of the connection to the engine (bounded_child.py). The engine sends the serialized
vocabulary first, then tasks. A task is [kind, value] in JSON, as in StructuredOutputParams. The answer is COMPILED and
the serialized grammar, or REFUSED or TOO_LARGE and the reason.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Final

import numpy as np
import xgrammar

from actors.model.grammar.compiler_process import COMPILED, REFUSED, TOO_LARGE
from actors.process.bounded_child import work

_SOURCE_PLACE: Final = re.compile(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ")
_MAX_REASON_CHARS: Final = 500


def main() -> None:
    """Compile grammars until the engine closes the connection."""
    descriptor, memory_bytes, max_whitespace = (int(argument) for argument in sys.argv[1:])

    def start(vocabulary: bytes) -> Callable[[bytes], bytes]:
        tokens = xgrammar.TokenizerInfo.deserialize_json(vocabulary.decode())
        compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)

        def answer_task(task: bytes) -> bytes:
            kind, value = json.loads(task)
            return answer(compiler, kind, value, max_whitespace)

        return answer_task

    work(descriptor, memory_bytes, start)


def answer(compiler: xgrammar.GrammarCompiler, kind: str, value: str, max_whitespace: int) -> bytes:
    """Compile one grammar. Returns COMPILED and the serialized grammar, or REFUSED or TOO_LARGE and why."""
    try:
        compiled = _compile(compiler, kind, value, max_whitespace)
        if not _has_beginning(compiled):
            return REFUSED + b"no output could be of this form"
        return COMPILED + compiled.serialize_json().encode()
    except (MemoryError, RuntimeError, ValueError, TypeError) as error:
        words = " ".join(_SOURCE_PLACE.sub("", str(error)).split())
        if isinstance(error, MemoryError) or "std::bad_alloc" in words:
            return TOO_LARGE + b"it takes too much memory to compile"
        return REFUSED + words[:_MAX_REASON_CHARS].encode(errors="replace")


def _has_beginning(compiled: xgrammar.CompiledGrammar) -> bool:
    """Whether the grammar allows any first token; a schema that only refers to itself, for instance, allows none."""
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
            # A string literal in xgrammar's grammar syntax is written like a JSON string.
            literals = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(value)]
            return compiler.compile_grammar("root ::= " + " | ".join(literals))
        case "grammar":
            return compiler.compile_grammar(value)
        case _:
            raise ValueError(f"a grammar of kind {kind!r} is not known")


if __name__ == "__main__":
    main()
