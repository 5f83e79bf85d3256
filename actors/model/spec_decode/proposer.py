"""The interface of the objects that draft a request's next tokens."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Proposer(Protocol):
    """Drafts tokens for rows of the persistent batch. A wrong draft costs time, never a wrong token."""

    def propose(self, rows: np.ndarray, epochs: np.ndarray, num_wanted: np.ndarray) -> list[list[int]]:
        """Draft the tokens that follow each row's last token.

        rows: [n] int64
        epochs: [n] int64, which request has the row: a number that changes each time the row goes to another request
        num_wanted: [n] int64, the most drafts for each row
        """
