"""Grammars as the scheduler sees them: compiled elsewhere, while the request waits in WAITING_FOR_FSM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from actors.core.requests.request import Request
from actors.core.requests.sampling_params import StructuredOutputParams
from actors.core.requests.token_rules import TokenRules


@dataclass(frozen=True, slots=True)
class GrammarFailure:
    """Why a request will never have its grammar.

    is_requests_fault: it is the grammar's, whichever engine compiles it
    """

    reason: str
    is_requests_fault: bool = True


class StructuredOutputManager(Protocol):
    """Compiles grammars off the step and follows each request's tokens through its own. Never blocks."""

    def start_compiling(self, request_id: str, params: StructuredOutputParams, output_token_ids: Sequence[int]) -> None:
        """Begin to compile. output_token_ids: tokens that the request came with, for its matcher to go through."""

    def take_compiled(self) -> dict[str, GrammarFailure | None]:
        """Requests whose grammar is ready since the last call, or does not compile: then the compiler's words."""

    def accept_tokens(self, request_id: str, token_ids: Sequence[int]) -> str | None:
        """Move the request's matcher on; if it cannot go on by these tokens, say why."""

    def count_allowed(self, request_id: str, token_ids: Sequence[int]) -> int:
        """How many of these tokens, guessed to come next, the grammar allows from the first on."""

    def fill_bitmask(
        self, request_ids: Iterable[str], guesses: Mapping[str, Sequence[int]] | None = None
    ) -> np.ndarray:
        """Say which tokens may come next, and which after each guess. guesses: by request id, of some or of others too.

        Returns [num_rows, ceil(vocab_size / 32)] int32, the lowest bit first: for each request a row, and one for each
        guess. What may follow a guess that is not allowed is anything: it is not looked at.
        """

    def release(self, request_id: str) -> None:
        """The request has ended; its grammar may still be compiling. Unknown ones are ignored."""

    def shutdown(self) -> None:
        """The engine ends: let go of threads and processes."""


def find_objection(manager: StructuredOutputManager | None, request: Request, token_ids: Sequence[int]) -> str | None:
    """Move the request's matcher on, if it has one; if it cannot go on by these tokens, return why.

    token_ids: the last ones of its output
    """
    if manager is None or request.sampling_params.structured_output is None:
        return None
    objection = manager.accept_tokens(request.request_id, token_ids)
    if (rules := TokenRules.of(request.sampling_params)) is None:
        return objection
    # Where rules and grammar together leave no token, what was sampled breaks one of them.
    objection = objection or rules.find_breach(request.output_token_ids, request.num_output_tokens - len(token_ids))
    return f"{objection}; grammar, allowed_token_ids and bad_words leave none" if objection else None


def cut_drafts(manager: StructuredOutputManager | None, request: Request, token_ids: list[int]) -> list[int]:
    """Leave out the guesses that the request's grammar forbids, if it has one: they would be wrong for sure."""
    if manager is None or request.sampling_params.structured_output is None:
        return token_ids
    return token_ids[: manager.count_allowed(request.request_id, token_ids)]
