"""Forbids all tokens but those of a mask, one bit a token."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from actors.model.sampling.transfers import is_on_host, upload

EVERY_TOKEN: Final = -1
"""32 bits of a mask that allow every token."""


def forbid_unmasked(logits: Tensor, bits: np.ndarray) -> Tensor:
    """Return a copy with -inf for the tokens that are not allowed.

    logits: [n, vocab_size] float32
    bits: [n, ceil(vocab_size / 32)] int32, 1 for an allowed token, the lowest bit first
    """
    vocab_size = logits.shape[1]
    if is_on_host(logits):
        is_allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        # NaN where a token is allowed and -inf elsewhere: fmin takes the other number beside a NaN. A fill by a mask
        # takes ten times as long where the mask cannot be predicted.
        bounds = is_allowed.astype(np.float32)
        bounds -= 1.0
        with np.errstate(invalid="ignore"):
            bounds *= np.inf
            return torch.from_numpy(np.fmin(logits.numpy(), bounds, out=bounds))
    octets = upload(bits.view(np.uint8), logits.device)
    bit_of_octet = 2 ** torch.arange(8, dtype=torch.uint8, device=logits.device)
    is_forbidden = (octets[:, :, None] & bit_of_octet).eq_(0).bool().flatten(1)[:, :vocab_size]
    return logits.masked_fill(is_forbidden, -torch.inf)
