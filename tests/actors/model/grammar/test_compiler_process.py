"""The process that compiles may do what it likes: its engine goes on.

Tests of actors/model/grammar/compiler_child.py, actors/model/grammar/errors.py, actors/process/bounded_child.py,
actors/process/bounded_process.py.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from actors.config import GrammarConfig
from actors.core.requests.sampling_params import StructuredOutputParams
from actors.model.grammar.compiler_process import CompilerProcess
from actors.model.grammar.errors import CompilerUnusable, GrammarRefused, GrammarTooLarge, GrammarTooSlow

_CHILD = """
import os, sys, threading
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
vocabulary = connection.recv_bytes()
connection.send_bytes(b"")
while True:
    task = connection.recv_bytes()
    if b"hang" in task:
        threading.Event().wait()
    if b"die" in task:
        os._exit(1)
    if b"memory" in task:
        connection.send_bytes(b"lit takes too much memory")
        continue
    padding = b"." * task.count(b"large") * 2_000_000
    connection.send_bytes(b"c" + vocabulary + b" " + str(os.getpid()).encode() + padding)
"""

_PATIENT_S = 60.0
"""Enough for a process that waits for a core."""
_LIMIT_S = 0.5


def grammar(value: str) -> StructuredOutputParams:
    return StructuredOutputParams("regex", value)


@pytest.fixture
def compiler() -> Iterator[CompilerProcess]:
    config = GrammarConfig(compile_timeout_s=_PATIENT_S, max_compiled_mib=1)
    compiler = CompilerProcess(config, (sys.executable, "-c", _CHILD))
    yield compiler
    compiler.close()


def pid_of(compiler: CompilerProcess) -> int:
    vocabulary, pid = compiler.compile(grammar("a"), lambda: "words").split()
    assert vocabulary == "words"
    return int(pid)


def test_it_starts_once(compiler: CompilerProcess) -> None:
    assert pid_of(compiler) == pid_of(compiler) != os.getpid()


@pytest.mark.parametrize(
    ("value", "words", "kind"),
    [
        ("hang", "longer than 60 s to compile", GrammarTooSlow),
        ("die", "too much memory", GrammarTooLarge),
        ("large", "too large", GrammarTooLarge),
    ],
)
def test_a_grammar_that_is_too_much_for_it_is_refused_and_the_next_one_is_not(
    value: str, words: str, kind: type[GrammarRefused], compiler: CompilerProcess
) -> None:
    first, began_s, limits = pid_of(compiler), time.monotonic(), compiler._process._limits
    if value == "hang":
        compiler._process._limits = replace(limits, timeout_s=_LIMIT_S)
    with pytest.raises(kind, match=words):
        compiler.compile(grammar(value), lambda: "words")
    compiler._process._limits = limits
    assert time.monotonic() - began_s < _PATIENT_S / 2
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert pid_of(compiler) != first


def test_a_grammar_whose_compiler_has_no_memory_left_is_too_large(compiler: CompilerProcess) -> None:
    first = pid_of(compiler)
    with pytest.raises(GrammarTooLarge, match="it takes too much memory"):
        compiler.compile(grammar("memory"), lambda: "words")
    assert pid_of(compiler) == first


def test_closing_it_ends_the_process_and_whoever_waits() -> None:
    compiler = CompilerProcess(GrammarConfig(compile_timeout_s=_PATIENT_S), (sys.executable, "-c", _CHILD))
    pid_of(compiler)
    closing = threading.Timer(0.05, compiler.close)
    closing.start()
    with pytest.raises(CompilerUnusable):
        compiler.compile(grammar("hang"), lambda: "words")
    closing.join()
    with pytest.raises(CompilerUnusable):
        compiler.compile(grammar("a"), lambda: "words")


def test_a_process_that_does_not_start_is_no_fault_of_the_grammar() -> None:
    compiler = CompilerProcess(GrammarConfig(), (sys.executable, "-c", "raise SystemExit(1)"))
    with pytest.raises(CompilerUnusable, match="does not start"):
        compiler.compile(grammar("a"), lambda: "words")
