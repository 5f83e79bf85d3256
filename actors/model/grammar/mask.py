"""Sets the logits of all tokens that a request's grammar does not allow to minus infinity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

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

    def forbid(self, logits: Tensor, rows: np.ndarray) -> None:
        """Set the logits of tokens that are not allowed to -inf.

        logits: [m, vocab_size] floating, changed in place
        rows:   [m] int64, increasing, the index of each row of logits among the sampled rows; contains all of self.rows
        """
        octets = torch.from_numpy(self.bits.view(np.uint8)).to(logits.device)
        bit_of_octet = 2 ** torch.arange(8, dtype=torch.uint8, device=logits.device)
        is_forbidden = (octets[:, :, None] & bit_of_octet).eq_(0).bool().flatten(1)[:, : logits.shape[1]]
        if len(self.rows) == len(rows):
            logits.masked_fill_(is_forbidden, -torch.inf)
            return
        masked = torch.from_numpy(np.searchsorted(rows, self.rows)).to(logits.device)
        logits[masked] = logits[masked].masked_fill_(is_forbidden, -torch.inf)
