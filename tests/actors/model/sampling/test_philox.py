from __future__ import annotations

import numpy as np
import pytest

from actors.model.sampling.philox import philox4x32, uniforms

# The known-answer vectors of Random123 (kat_vectors, "philox4x32 10"): counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16)] for word in text.split()], dtype=np.uint64)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_block_function_gives_the_known_answers(counter: str, key: str, result: str) -> None:
    assert (philox4x32(words(counter), words(key)) == words(result)).all()


def test_a_number_depends_on_its_seed_and_position_only() -> None:
    seeds = np.array([1, 1, 2, (1 << 64) - 1], dtype=np.uint64)
    positions = np.array([0, 1, 0, 1 << 40], dtype=np.uint64)

    together = uniforms(seeds, positions)

    assert len(set(together.tolist())) == 4
    for index in range(4):
        alone = uniforms(seeds[index : index + 1], positions[index : index + 1])
        assert alone.tolist() == [together[index]]


def test_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    count = np.arange(20_000, dtype=np.uint64)
    for numbers in (uniforms(np.full_like(count, 42), count), uniforms(count, np.full_like(count, 3))):
        assert ((numbers >= 0.0) & (numbers < 1.0)).all()
        in_bins, _ = np.histogram(numbers, bins=20, range=(0.0, 1.0))
        chi_squared = float(((in_bins - 1000) ** 2 / 1000).sum())
        assert chi_squared < 43.8  # 19 degrees of freedom, one in a thousand
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
