"""The seeds of a prompt's samples: an ingress samples with them, and a client that resumes a sample computes them."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

MAX_SEED: Final = 2**63 - 1


def sample_seed(seed: int, sample_index: int) -> int:
    """Return the seed of one of a prompt's samples. seed: the seed of the first sample"""
    if sample_index == 0:
        return seed
    digest = blake2b(f"raypd/sample/{seed}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED
