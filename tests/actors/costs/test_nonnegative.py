from __future__ import annotations

import itertools

import numpy as np
import pytest

from actors.costs.nonnegative import solve_nonnegative


@pytest.mark.parametrize("seed", range(30))
def test_the_solution_is_the_best_of_all_supports(seed: int) -> None:
    rng = np.random.default_rng(seed)
    inputs, targets = rng.standard_normal((20, 5)), rng.standard_normal(20)
    gram, moment = inputs.T @ inputs / 20, inputs.T @ targets / 20

    def objective(x: np.ndarray) -> float:
        return float(x @ gram @ x / 2 - moment @ x)

    best = 0.0
    for size in range(1, 6):
        for support in itertools.combinations(range(5), size):
            trial = np.zeros(5)
            trial[list(support)] = np.linalg.solve(gram[np.ix_(support, support)], moment[list(support)])
            if (trial >= 0).all():
                best = min(best, objective(trial))
    solution = solve_nonnegative(gram, moment)
    assert (solution >= 0).all()
    assert objective(solution) == pytest.approx(best, abs=1e-9)


def test_nothing_positive_fits() -> None:
    assert not solve_nonnegative(np.eye(3), np.array([-1.0, -2.0, 0.0])).any()
