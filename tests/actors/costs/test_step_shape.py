from __future__ import annotations

import numpy as np

from actors.costs.step_shape import FEATURES, StepShape, features_of_shapes


def test_a_batch_has_decodes_and_chunks() -> None:
    shape = StepShape.of_batch(np.array([1, 1, 100, 40]), np.array([10, 20, 0, 60]))
    assert shape == StepShape(142, 2, 30, 2, 60, 100 * 50 + 40 * (60 + 20))


def test_a_decode_with_drafts_is_a_decode() -> None:
    shape = StepShape.of_batch(np.array([5, 6]), np.array([10, 20]), num_drafts=4)
    assert (shape.num_decodes, shape.num_prefills, shape.num_tokens) == (1, 1, 11)


def test_features_have_the_order_of_their_names() -> None:
    [features] = features_of_shapes([StepShape(300, 4, 1000, 2, 64, 5000.0)])
    assert dict(zip(FEATURES, features.tolist(), strict=True)) == {
        "step": 1,
        "token": 300,
        "token_above_16": 284,
        "token_above_128": 172,
        "token_above_256": 44,
        "token_above_512": 0,
        "decode": 4,
        "decode_context_token": 1000,
        "prefill": 1,
        "prefill_context_token": 64,
        "prefill_pair": 5000,
    }


def test_no_steps_have_no_features() -> None:
    assert features_of_shapes([]).shape == (0, len(FEATURES))
