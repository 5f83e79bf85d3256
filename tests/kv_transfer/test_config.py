from __future__ import annotations

import pytest
from pydantic import ValidationError

from kv_transfer.config import KVTransferConfig


def test_a_transport_that_is_gone_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(ValidationError, match=r"transport\n.*'auto', 'loopback', 'nccl' or 'tcp'.*input_value='gloo'"):
        KVTransferConfig.model_validate({"transport": "gloo"})
