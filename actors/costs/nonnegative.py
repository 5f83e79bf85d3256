"""Least squares with coefficients that are not negative: more work never takes less time."""

from __future__ import annotations

from typing import Final

import numpy as np

from actors.costs.step_shape import Floats

_TOLERANCE: Final = 1e-10


def solve_nonnegative(gram: Floats, moment: Floats) -> Floats:
    """Minimise x @ gram @ x / 2 - moment @ x for x >= 0.

    gram:   [n, n], symmetric and positive definite, with a diagonal of the order of 1
    moment: [n]
    Returns [n]. The method is that of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23), on the
    normal equations as in Bro and de Jong's FNNLS: indices enter a passive set by the steepest gradient, and leave it
    where the unrestricted solution of the set would be negative. Each round lowers the objective, so it ends.
    """
    num = len(moment)
    solution, is_free = np.zeros(num), np.zeros(num, dtype=bool)
    for _ in range(3 * num):
        gradient = moment - gram @ solution
        gradient[is_free] = 0.0
        entering = int(gradient.argmax())
        if gradient[entering] <= _TOLERANCE:
            break
        is_free[entering] = True
        while True:
            trial = np.zeros(num)
            trial[is_free] = np.linalg.solve(gram[np.ix_(is_free, is_free)], moment[is_free])
            is_negative = is_free & (trial <= 0)
            if not is_negative.any():
                solution = trial
                break
            steps = np.full(num, np.inf)
            steps[is_negative] = solution[is_negative] / np.maximum(solution - trial, 1e-300)[is_negative]
            first = int(steps.argmin())
            solution = solution + min(1.0, float(steps[first])) * (trial - solution)
            is_free &= solution > _TOLERANCE
            # Rounding may leave more than the tolerance there, and then no round would be the last.
            is_free[first] = False
            solution[~is_free] = 0.0
            if not is_free.any():
                break
    return solution
