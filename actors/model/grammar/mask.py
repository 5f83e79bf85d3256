"""The tokens that grammars allow in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from actors.core.outputs.scheduler_output import SchedulerOutput


@dataclass(frozen=True, slots=True, eq=False)
class GrammarMask:
    """The next tokens that grammars allow, for those sampled rows that have a grammar.

    A sampled row is a row of logits from which the step samples a token.
    rows: [n] int64, increasing, the indices of these rows among the sampled rows
    bits: [n, ceil(vocab_size / 32)] int32, 1 for an allowed token, the lowest bit first
    """

    rows: np.ndarray
    bits: np.ndarray

    @classmethod
    def of_step(cls, scheduler_output: SchedulerOutput, sampled: np.ndarray) -> Self | None:
        """Pick the masks of the requests that sample in this step; requests in the middle of their prompts do not.

        sampled: [num_sampled] int64, for each sampled row, the position of its request in the batch, in increasing
            order; a request with draft tokens has a further row for each of them
        Returns None if no row has a grammar.
        """
        if (bits := scheduler_output.grammar_bitmask) is None:
            return None
        requests, drafts = scheduler_output.structured_output_request_ids, scheduler_output.scheduled_spec_decode_tokens
        num_rows = [1 + len(drafts.get(request_id, ())) for request_id in requests]
        positions = np.repeat(np.fromiter(requests.values(), dtype=np.int64), num_rows)
        order = np.argsort(positions, kind="stable")
        order = order[np.isin(positions[order], sampled)]
        return cls(np.flatnonzero(np.isin(sampled, positions)), bits[order]) if len(order) else None
