"""Counter-based random numbers: each is a function of its key and counter alone.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_NUM_ROUNDS = 10


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return one number in [0, 1) for each (seed, position), with 53 random bits.

    seeds:     [n] uint64, the key
    positions: [n] uint64, the counter: the token's index in its request's whole output
    Returns [n] float64.
    """
    counter = np.zeros((4, len(positions)), dtype=np.uint64)
    counter[0], counter[1] = positions & _LOW_32, positions >> _SHIFT_32
    words = philox4x32(counter, np.stack([seeds & _LOW_32, seeds >> _SHIFT_32]))
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)
    numbers: np.ndarray = (high * np.uint64(1 << 26) + low).astype(np.float64) * 2.0**-53
    return numbers


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ten rounds of the block function.

    counter: [4, n] and key: [2, n], uint64 holding 32-bit words
    Returns [4, n], uint64 holding 32-bit words.
    """
    first, second, third, fourth = counter
    key_low, key_high = key
    for _ in range(_NUM_ROUNDS):
        product, other_product = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second, third, fourth = (
            (other_product >> _SHIFT_32) ^ second ^ key_low,
            other_product & _LOW_32,
            (product >> _SHIFT_32) ^ fourth ^ key_high,
            product & _LOW_32,
        )
        key_low, key_high = (key_low + _KEY_STEPS[0]) & _LOW_32, (key_high + _KEY_STEPS[1]) & _LOW_32
    return np.stack([first, second, third, fourth])
