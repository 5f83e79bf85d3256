"""The scheduler's interface to grammars. They are compiled elsewhere, while requests wait in WAITING_FOR_FSM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Protocol

import numpy as np
from msgspec import Meta

from actors.core.requests.request import Request
from actors.core.requests.sampling_params import StructuredOutputParams
from actors.core.requests.token_rules import TokenRules
from kv_transfer.message_ranges import MAX_KINDS, Clock, Total, Word

COMPILE_FAILURES: Final = ("wrong", "too_slow", "too_large", "no_compiler")
"""Why compilations fail: the grammar is wrong, it takes too much time or memory, or no compiler can be had."""


@dataclass(frozen=True, slots=True)
class GrammarFailure:
    """Why a request's grammar cannot be used.

    is_requests_fault: the grammar itself is wrong, so it would fail on every engine
    """

    reason: str
    is_requests_fault: bool = True


@dataclass(slots=True)
class GrammarStats:
    """The compilations of an engine's grammars. Totals count from the engine's start.

    num_compiled: compilations that gave a grammar
    num_failed:   compilations that failed, by COMPILE_FAILURES
    num_cached:   requests whose grammar, or its refusal, was known from a compilation before
    compile_s:    time of all compilations, failed ones included
    """

    num_compiled: Total = 0
    num_failed: Annotated[dict[Word, Total], Meta(max_length=MAX_KINDS)] = field(default_factory=dict)
    num_cached: Total = 0
    compile_s: Clock = 0.0


class StructuredOutputManager(Protocol):
    """Compiles the grammars of requests in the background, and matches each request's tokens. No method blocks."""

    def start_compiling(self, request_id: str, params: StructuredOutputParams, output_token_ids: Sequence[int]) -> None:
        """Begin to compile a request's grammar.

        output_token_ids: the output tokens that the request came with; its matcher accepts them first
        """

    def take_compiled(self) -> dict[str, GrammarFailure | None]:
        """Return the requests whose compilation ended since the last call: None, or why it failed, by request id."""

    def accept_tokens(self, request_id: str, token_ids: Sequence[int]) -> str | None:
        """Advance the request's matcher by these tokens. Returns None, or why the grammar does not accept them."""

    def count_allowed(self, request_id: str, token_ids: Sequence[int]) -> int:
        """Return how many of these draft tokens the grammar allows, up to the first one that it does not."""

    def fill_bitmask(self, request_ids: Iterable[str], drafts: Mapping[str, Sequence[int]] | None = None) -> np.ndarray:
        """Return which tokens each request's grammar allows next, and which it allows after each draft token.

        drafts: draft tokens by request id; requests may be missing, and entries of other requests are ignored
        Returns [num_rows, ceil(vocab_size / 32)] int32, 1 for an allowed token, the lowest bit first. Each request has
        one row, followed by one row for each of its draft tokens. A row after a draft token that is not allowed may
        hold anything, since nobody reads it.
        """

    def release(self, request_id: str) -> None:
        """Forget a request that has ended, even if its grammar is still being compiled. Unknown ids are ignored."""

    def make_stats(self) -> GrammarStats:
        """Return a snapshot of the counters."""

    def shutdown(self) -> None:
        """End all threads and processes, since the engine ends."""


def find_objection(manager: StructuredOutputManager | None, request: Request, token_ids: Sequence[int]) -> str | None:
    """Advance the request's matcher, if the request has a grammar. Returns None, or why the output cannot go on.

    token_ids: the request's newest output tokens
    """
    if manager is None or request.sampling_params.structured_output is None:
        return None
    objection = manager.accept_tokens(request.request_id, token_ids)
    if (rules := TokenRules.of(request.sampling_params)) is None:
        return objection
    # If the token rules and the grammar together allow no token, the sampled token breaks one of them.
    objection = objection or rules.find_breach(request.output_token_ids, request.num_output_tokens - len(token_ids))
    return f"{objection}; grammar, allowed_token_ids and bad_words together allow no token" if objection else None


def cut_drafts(manager: StructuredOutputManager | None, request: Request, token_ids: list[int]) -> list[int]:
    """Return the draft tokens up to the first one that the request's grammar forbids, or all without a grammar."""
    if manager is None or request.sampling_params.structured_output is None:
        return token_ids
    return token_ids[: manager.count_allowed(request.request_id, token_ids)]
