"""Which seeds a prompt's samples have: for those who make them, and for a client that goes on with them elsewhere."""

from __future__ import annotations

from hashlib import blake2b

from cluster.parameters.sampling_rules import MAX_SEED


def sample_seed(seed: int, sample_index: int) -> int:
    """The seed of one of a prompt's samples. seed: the first one's."""
    if sample_index == 0:
        return seed
    digest = blake2b(f"raypd/sample/{seed}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED
