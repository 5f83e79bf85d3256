"""Merges the outputs that several engines send for one request: in order of position, each position once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actors.core.outputs.engine_core_outputs import EngineCoreOutput


class Diverged(Exception):
    """Two engines gave different tokens for the same position."""

    def __init__(self, position: int, first: int, second: int) -> None:
        super().__init__(f"position {position} was token {first} and then token {second}")


class OutputOrder:
    """Passes outputs on in the order of their positions.

    The prefill engine sends the first token and the decode engine the others, over two connections. So an output can
    come too early, and is kept until the gap before it has been filled.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        """token_ids: the output tokens that the client already has"""
        self._token_ids = list(token_ids)
        self._early: list[EngineCoreOutput] = []

    @property
    def token_ids(self) -> Sequence[int]:
        """Every token passed on so far, after those that the client already had."""
        return self._token_ids

    @property
    def has_gap(self) -> bool:
        """Whether outputs are kept because an earlier position has not come."""
        return bool(self._early)

    def push(self, output: EngineCoreOutput) -> list[EngineCoreOutput]:
        """Take an output, and return the outputs that are now next in order, without positions passed on before.

        Raises Diverged if a position comes again with another token.
        """
        if not self._early and output.first_position == len(self._token_ids):
            self._token_ids += output.new_token_ids
            return [output]
        self._early.append(output)
        self._early.sort(key=lambda early: early.first_position)
        ready: list[EngineCoreOutput] = []
        while self._early and self._early[0].first_position <= len(self._token_ids):
            new = self._without_passed_on(self._early.pop(0))
            self._token_ids += new.new_token_ids
            ready.append(new)
        return ready

    def _without_passed_on(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Return the output without the tokens that were passed on already, even if no token is left.

        Raises Diverged if one of these is not the token that was passed on.
        """
        num_passed_on = len(self._token_ids) - output.first_position
        if num_passed_on == 0:
            return output
        for position, token_id in enumerate(output.new_token_ids[:num_passed_on], start=output.first_position):
            if token_id != self._token_ids[position]:
                raise Diverged(position, self._token_ids[position], token_id)
        return replace(
            output,
            new_token_ids=output.new_token_ids[num_passed_on:],
            first_position=len(self._token_ids),
            logprobs=None if output.logprobs is None else output.logprobs[num_passed_on:],
            prompt_logprobs=None,
        )
