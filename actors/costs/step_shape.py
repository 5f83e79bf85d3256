"""Describes what a step computes, by the numbers that its duration depends on, and makes features of them.

The linear form is that of reference measurements on GPUs: a constant, tokens, query-key pairs of prefill, context that
decodes read, decoding requests, hinges in the number of tokens (below a few hundred tokens a GPU, and below a few a
CPU, waits for the weights and not for the arithmetic), and terms for steps that have any prefill at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

HINGES: Final = (16, 128, 256, 512)
"""Numbers of tokens in a step above which each further token may cost more."""
FEATURES: Final = (
    "step",
    "token",
    *(f"token_above_{hinge}" for hinge in HINGES),
    "decode",
    "decode_context_token",
    "prefill",
    "prefill_context_token",
    "prefill_pair",
)
"""The names of the features, in the order of coefficients."""
NUM_FEATURES: Final = len(FEATURES)


@dataclass(frozen=True, slots=True)
class StepShape:
    """The work of one step.

    num_tokens:          tokens that the step computes, of prompts and of decodes, draft tokens included
    num_decodes:         requests that compute their next token
    num_decode_context:  tokens before these, summed over the requests
    num_prefills:        requests that compute a chunk of their prompt
    num_prefill_context: tokens before the chunks, summed over the requests
    num_prefill_pairs:   pairs of a query and a key in the chunks' attention: the sum of chunk * (before + chunk / 2)
    """

    num_tokens: float
    num_decodes: float = 0
    num_decode_context: float = 0
    num_prefills: float = 0
    num_prefill_context: float = 0
    num_prefill_pairs: float = 0

    @classmethod
    def of_batch(cls, num_new_tokens: Ints, num_computed_tokens: Ints, num_drafts: int = 0) -> StepShape:
        """Describe a scheduled batch; both arrays are [num_requests].

        num_drafts: the most draft tokens of a decoding request. A chunk as short as a decode with drafts counts as a
        decode, which costs the same
        """
        is_decode = num_new_tokens <= 1 + num_drafts
        chunks, before = num_new_tokens[~is_decode], num_computed_tokens[~is_decode]
        return cls(
            num_tokens=int(num_new_tokens.sum()),
            num_decodes=int(is_decode.sum()),
            num_decode_context=int(num_computed_tokens[is_decode].sum()),
            num_prefills=len(chunks),
            num_prefill_context=int(before.sum()),
            num_prefill_pairs=float((chunks * (before + chunks / 2)).sum()),
        )


def features_of(
    num_tokens: Floats,
    num_decodes: Floats,
    num_decode_context: Floats,
    num_prefills: Floats,
    num_prefill_context: Floats,
    num_prefill_pairs: Floats,
) -> Floats:
    """Return the features of n steps, [n, NUM_FEATURES]; each argument is [n], named as in StepShape."""
    hinges = [np.maximum(num_tokens - hinge, 0) for hinge in HINGES]
    return np.stack(
        [
            np.ones_like(num_tokens),
            num_tokens,
            *hinges,
            num_decodes,
            num_decode_context,
            np.minimum(num_prefills, 1),
            num_prefill_context,
            num_prefill_pairs,
        ],
        axis=1,
    )


def features_of_shapes(shapes: list[StepShape]) -> Floats:
    """Return the features of these steps, [len(shapes), NUM_FEATURES]."""
    columns = np.array(
        [
            (
                shape.num_tokens,
                shape.num_decodes,
                shape.num_decode_context,
                shape.num_prefills,
                shape.num_prefill_context,
                shape.num_prefill_pairs,
            )
            for shape in shapes
        ],
        dtype=np.float64,
    ).reshape(-1, 6)
    return features_of(*columns.T)
