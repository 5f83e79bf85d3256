"""Compiled grammars that later requests may have as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.core.requests.sampling_params import StructuredOutputParams
from actors.model.grammar.errors import GrammarError
from actors.process.sized_cache import SizedCache

if TYPE_CHECKING:
    import xgrammar


class GrammarCache:
    """By what they were compiled from, refusals as well. What was not used for longest goes first."""

    def __init__(self, max_bytes: int) -> None:
        self._grammars: SizedCache[StructuredOutputParams, xgrammar.CompiledGrammar | GrammarError] = SizedCache(
            max_bytes
        )

    def get(self, params: StructuredOutputParams) -> xgrammar.CompiledGrammar | GrammarError | None:
        """What came of compiling it, if that is known."""
        return self._grammars.get(params)

    def put(self, params: StructuredOutputParams, compiled: xgrammar.CompiledGrammar | GrammarError) -> None:
        """Keep a new one, and let go of others until there is room; one that is too large alone is not kept."""
        size = len(str(compiled)) if isinstance(compiled, GrammarError) else int(compiled.memory_size_bytes)
        self._grammars.put(params, compiled, size + len(params.value))
