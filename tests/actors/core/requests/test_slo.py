"""The service-level aims that a request carries."""

from __future__ import annotations

import math

import msgspec
import pytest

from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.core.requests.slo import MAX_AIM_S, Slo
from kv_transfer.message_ranges import MALFORMED

REQUEST = EngineCoreRequest(
    request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(), slo=Slo(ttft_s=0.5, itl_s=MAX_AIM_S)
)


def test_a_request_carries_its_aims_between_processes() -> None:
    encoded = msgspec.msgpack.encode(REQUEST)
    assert msgspec.msgpack.decode(encoded, type=EngineCoreRequest).slo == REQUEST.slo


@pytest.mark.parametrize("name", ["ttft_s", "itl_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, MAX_AIM_S * 1.001, math.inf, math.nan])
def test_an_aim_out_of_range_is_refused_where_the_message_is_read(name: str, value: float) -> None:
    encoded = msgspec.msgpack.encode({name: value})
    with pytest.raises(MALFORMED):
        msgspec.msgpack.decode(encoded, type=Slo)
