"""Compiled grammars that later requests may have as well."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from actors.core.sampling_params import StructuredOutputParams
from actors.model.grammar.errors import GrammarError

if TYPE_CHECKING:
    import xgrammar


class GrammarCache:
    """By what they were compiled from, refusals as well. What was not used for longest goes first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._grammars: OrderedDict[StructuredOutputParams, xgrammar.CompiledGrammar | GrammarError] = OrderedDict()
        self._num_bytes = 0

    def get(self, params: StructuredOutputParams) -> xgrammar.CompiledGrammar | GrammarError | None:
        """What came of compiling it, if that is known."""
        if params in self._grammars:
            self._grammars.move_to_end(params)
        return self._grammars.get(params)

    def put(self, params: StructuredOutputParams, compiled: xgrammar.CompiledGrammar | GrammarError) -> None:
        """Keep a new one, and let go of others until there is room; one that is too large alone is not kept."""
        self._grammars[params] = compiled
        self._num_bytes += _num_bytes(params, compiled)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _num_bytes(*self._grammars.popitem(last=False))


def _num_bytes(params: StructuredOutputParams, compiled: xgrammar.CompiledGrammar | GrammarError) -> int:
    size = len(str(compiled)) if isinstance(compiled, GrammarError) else int(compiled.memory_size_bytes)
    return size + len(params.value)
