"""The interface of the objects that guess a request's next tokens."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Proposer(Protocol):
    """Guesses tokens for rows of the persistent batch. A wrong guess costs time, never a wrong token."""

    def propose(self, rows: np.ndarray, epochs: np.ndarray, num_wanted: np.ndarray) -> list[list[int]]:
        """Guess at most so many tokens for each row, to go on with after its last one.

        rows, num_wanted: [n] int64
        epochs: [n] int64, whose rows these are: a number that is new each time a row is given
        """
