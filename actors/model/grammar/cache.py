"""Keeps compiled grammars for later requests that name the same grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.core.requests.sampling_params import StructuredOutputParams
from actors.model.grammar.errors import GrammarError
from actors.process.sized_cache import SizedCache

if TYPE_CHECKING:
    import xgrammar


class GrammarCache:
    """Compiled grammars and refusals, by the parameters of requests. Drops the least recently used ones first."""

    def __init__(self, max_bytes: int) -> None:
        self._grammars: SizedCache[StructuredOutputParams, xgrammar.CompiledGrammar | GrammarError] = SizedCache(
            max_bytes
        )

    def get(self, params: StructuredOutputParams) -> xgrammar.CompiledGrammar | GrammarError | None:
        """Return the compiled grammar of these parameters, or its refusal; None if the cache does not have them."""
        return self._grammars.get(params)

    def put(self, params: StructuredOutputParams, compiled: xgrammar.CompiledGrammar | GrammarError) -> None:
        """Keep a result, and drop others until it fits. A result larger than the whole cache is not kept."""
        size = len(str(compiled)) if isinstance(compiled, GrammarError) else int(compiled.memory_size_bytes)
        self._grammars.put(params, compiled, size + len(params.value))
