from __future__ import annotations

import pytest

from actors.core.requests.multimodal import EncoderInput, PackedArray
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from cluster.errors import Overloaded
from cluster.images.image_budget import ImageBudget

MIB = 1 << 20


def request(*sizes_mib: int) -> EngineCoreRequest:
    """A request whose images take so many MiB each."""
    images = tuple(
        EncoderInput(str(number), {"pixels": PackedArray("uint8", (size * MIB,), bytes(size * MIB))})
        for number, size in enumerate(sizes_mib)
    )
    return EngineCoreRequest(
        request_id="r", prompt_token_ids=[1, 2, 3], sampling_params=SamplingParams(), encoder_inputs=images
    )


def test_images_beyond_the_budget_are_refused_until_others_are_released() -> None:
    budget = ImageBudget(5 * MIB, retry_delay_s=2.0)
    taken = budget.exchange(0, request(1, 2))
    assert taken == 3 * MIB
    with pytest.raises(Overloaded, match="the images in flight have 3 MiB, and 5 are allowed") as refusal:
        budget.exchange(0, request(3))
    assert refusal.value.retry_delay_s == 2.0
    assert budget.exchange(0, request(2)) == 2 * MIB
    budget.release(taken)
    assert budget.exchange(0, request(3)) == 3 * MIB


def test_a_request_that_is_submitted_anew_gives_back_what_it_had() -> None:
    budget = ImageBudget(5 * MIB, retry_delay_s=2.0)
    taken = budget.exchange(0, request(4))
    assert budget.exchange(taken, request(5)) == 5 * MIB


def test_a_request_without_images_is_never_refused() -> None:
    budget = ImageBudget(0, retry_delay_s=2.0)
    assert budget.exchange(0, request()) == 0
