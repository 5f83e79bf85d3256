"""A layer that counts positions by transformers' cache gets each token's position in its request."""

from __future__ import annotations

import torch

from actors.model.attention_modules.request_positions import RequestPositions


def test_each_token_of_a_batch_is_counted_in_its_own_request() -> None:
    positions = torch.tensor([7, 0, 1, 2, 30])
    cache = RequestPositions(positions)

    # As Llama 4's attention does.
    assert torch.equal(torch.arange(5) + cache.get_seq_length(3), positions)


def test_nothing_is_stored() -> None:
    key, value = torch.zeros(1, 2, 5, 4), torch.ones(1, 2, 5, 4)

    assert RequestPositions(torch.arange(5)).update(key, value, 0) == (key, value)
