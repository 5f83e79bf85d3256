"""Compiles the grammars of an engine's requests in other processes, and matches each request's output tokens.

The engine thread calls every method, and no method waits. A grammar is compiled once for all requests that have it. A
process (compiler_process.py) compiles it, and a thread waits for that process. A cache keeps compiled grammars for
later requests. When a request's grammar is ready, the request gets a matcher, which first accepts the output tokens
that the request came with: a request that was handed over or resumed has such tokens.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from actors.config import GrammarConfig
from actors.core.requests.sampling_params import StructuredOutputParams
from actors.core.requests.structured_output import COMPILE_FAILURES, GrammarFailure, GrammarStats
from actors.model.grammar.cache import GrammarCache
from actors.model.grammar.compiler_process import CompilerProcess
from actors.model.grammar.errors import CompilerUnusable, GrammarError, GrammarRefused, GrammarTooLarge, GrammarTooSlow
from actors.model.grammar.vocabulary import LazyVocabulary, deserialize_grammar, load_vocabulary
from actors.process.cpu_binding import run_on_any_core

if TYPE_CHECKING:
    import xgrammar

    from actors.model.grammar.matching import TokenMatcher

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiter:
    """A request whose grammar is being compiled."""

    request_id: str
    output_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Compilation:
    """The end of a compilation. compiled: the grammar, or why there is none; seconds: how long the compilation took"""

    compiled: xgrammar.CompiledGrammar | GrammarError
    seconds: float


class XGrammarManager:
    """Compiles grammars with xgrammar. Implements StructuredOutputManager."""

    def __init__(
        self, config: GrammarConfig, vocabulary: LazyVocabulary, vocab_size: int, on_ready: Callable[[], None]
    ) -> None:
        """on_ready: called on another thread when take_compiled() has a result to return."""
        self._config = config
        self._vocabulary = vocabulary
        self._num_words = -(-vocab_size // 32)
        self._on_ready = on_ready
        self._compilers = [CompilerProcess(config) for _ in range(config.num_compilers)]
        self._idle: queue.SimpleQueue[CompilerProcess] = queue.SimpleQueue()
        for compiler in self._compilers:
            self._idle.put(compiler)
        # There are as many threads as compilers, so each thread finds an idle compiler.
        self._threads = ThreadPoolExecutor(
            config.num_compilers, thread_name_prefix="grammar", initializer=run_on_any_core
        )
        self._compiled: deque[tuple[StructuredOutputParams, _Compilation | None]] = deque()
        """Ended compilations; None instead of one that was not begun, since nobody waited any more."""
        self._stats = GrammarStats(num_failed=dict.fromkeys(COMPILE_FAILURES, 0))
        self._cache = GrammarCache(config.cache_mib << 20)
        self._waiters: dict[StructuredOutputParams, dict[str, _Waiter]] = {}
        self._ready: dict[str, GrammarFailure | None] = {}
        self._matchers: dict[str, TokenMatcher] = {}

    @classmethod
    def of_checkpoint(
        cls,
        config: GrammarConfig,
        directory: Path,
        *,
        vocab_size: int,
        stop_token_ids: tuple[int, ...],
        on_ready: Callable[[], None],
    ) -> Self:
        """Make a manager for a checkpoint that has a tokenizer.

        Loads the vocabulary and starts compilers when the first grammar comes, not before.
        directory: the checkpoint's
        stop_token_ids: the tokens that end an output
        """
        vocabulary = LazyVocabulary(lambda: load_vocabulary(directory, vocab_size, stop_token_ids))
        return cls(config, vocabulary, vocab_size, on_ready)

    def start_compiling(self, request_id: str, params: StructuredOutputParams, output_token_ids: Sequence[int]) -> None:
        """Begin to compile the request's grammar, unless the grammar is in the cache or being compiled.

        output_token_ids: the output tokens that the request came with; its matcher accepts them first
        """
        waiter = _Waiter(request_id, tuple(output_token_ids))
        if (known := self._cache.get(params)) is not None:
            self._stats.num_cached += 1
            self._answer(waiter, params, known)
        elif (others := self._waiters.get(params)) is not None:
            others[request_id] = waiter
        else:
            self._waiters[params] = {request_id: waiter}
            self._threads.submit(self._compile, params)

    def take_compiled(self) -> dict[str, GrammarFailure | None]:
        """Return the requests whose compilation ended since the last call: None, or why it failed, by request id."""
        while self._compiled:
            params, ended = self._compiled.popleft()
            waiters = self._waiters.pop(params)
            if ended is None:
                if waiters:
                    self._waiters[params] = waiters
                    self._threads.submit(self._compile, params)
                continue
            self._count(ended)
            compiled = ended.compiled
            if not isinstance(compiled, CompilerUnusable):
                self._cache.put(params, compiled)
            for waiter in waiters.values():
                self._answer(waiter, params, compiled)
        ready, self._ready = self._ready, {}
        return ready

    def accept_tokens(self, request_id: str, token_ids: Sequence[int]) -> str | None:
        """Advance the request's matcher by these tokens. Returns None, or why the grammar does not accept them."""
        return self._matchers[request_id].accept(token_ids)

    def count_allowed(self, request_id: str, token_ids: Sequence[int]) -> int:
        """Return how many of these draft tokens the grammar allows, up to the first one that it does not."""
        return self._matchers[request_id].count_allowed(token_ids)

    def fill_bitmask(self, request_ids: Iterable[str], drafts: Mapping[str, Sequence[int]] | None = None) -> np.ndarray:
        """See StructuredOutputManager."""
        drafted = {request_id: (drafts or {}).get(request_id, ()) for request_id in request_ids}
        bits = np.empty((sum(1 + len(token_ids) for token_ids in drafted.values()), self._num_words), dtype=np.int32)
        row = 0
        for request_id, token_ids in drafted.items():
            self._matchers[request_id].fill(bits, row, token_ids)
            row += 1 + len(token_ids)
        return bits

    def release(self, request_id: str) -> None:
        """Forget a request that has ended. Its grammar is compiled to the end, and kept for other requests."""
        self._matchers.pop(request_id, None)
        self._ready.pop(request_id, None)
        for waiters in self._waiters.values():
            waiters.pop(request_id, None)

    def make_stats(self) -> GrammarStats:
        """Return a snapshot of the counters."""
        return replace(self._stats, num_failed=dict(self._stats.num_failed))

    def shutdown(self) -> None:
        """End the compilers."""
        for compiler in self._compilers:
            compiler.close()
        self._threads.shutdown(cancel_futures=True)

    def _answer(
        self, waiter: _Waiter, params: StructuredOutputParams, compiled: xgrammar.CompiledGrammar | GrammarError
    ) -> None:
        if isinstance(compiled, GrammarError):
            is_fault = isinstance(compiled, GrammarRefused)
            self._ready[waiter.request_id] = GrammarFailure(str(compiled), is_requests_fault=is_fault)
            return
        # Imported here, so that xgrammar is loaded only when a grammar is compiled.
        from actors.model.grammar.matching import TokenMatcher

        matcher = TokenMatcher(
            compiled,
            self._vocabulary.get().texts,
            is_json=params.is_json,
            max_seconds_per_token=self._config.max_matching_ms_per_token / 1e3,
        )
        if (objection := matcher.accept(waiter.output_token_ids)) is None:
            self._matchers[waiter.request_id] = matcher
        self._ready[waiter.request_id] = None if objection is None else GrammarFailure(objection)

    def _compile(self, params: StructuredOutputParams) -> None:
        """Compile on a thread of the pool, unless all requests that waited for this grammar have ended."""
        began_s = time.perf_counter()
        compiled = self._try_to_compile(params) if self._waiters[params] else None
        seconds = time.perf_counter() - began_s
        self._compiled.append((params, None if compiled is None else _Compilation(compiled, seconds)))
        self._on_ready()

    def _count(self, ended: _Compilation) -> None:
        self._stats.compile_s += ended.seconds
        if isinstance(ended.compiled, GrammarError):
            self._stats.num_failed[_reason(ended.compiled)] += 1
        else:
            self._stats.num_compiled += 1

    def _try_to_compile(self, params: StructuredOutputParams) -> xgrammar.CompiledGrammar | GrammarError:
        compiler = self._idle.get_nowait()
        try:
            vocabulary = self._vocabulary.get()
            serialized = compiler.compile(params, vocabulary.tokens.serialize_json)
            return deserialize_grammar(serialized, vocabulary)
        except GrammarError as error:
            return error
        except Exception as error:
            logger.exception("a grammar was not compiled")
            return CompilerUnusable(f"{type(error).__name__}: {error}")
        finally:
            self._idle.put(compiler)


def _reason(error: GrammarError) -> str:
    """Return which of COMPILE_FAILURES an error is."""
    match error:
        case GrammarTooSlow():
            return "too_slow"
        case GrammarTooLarge():
            return "too_large"
        case GrammarRefused():
            return "wrong"
        case _:
            return "no_compiler"
