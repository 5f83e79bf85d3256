"""A step of the backend on a device that has no numbers: torch's FakeTensorMode over a private-use device.

test_operators.py runs this file in a process of its own, since torch takes the name of such a device once.
In this mode a mix of devices raises FakeTensorDeviceMismatchError, and what makes the host wait for the device raises
DataDependentOutputException.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from actors.model.attention.batch_attention import AttentionLayer, BatchShape
from actors.model.attention.probe import KVGeometry
from actors.model.attention.triton_backend import TritonAttention

LAYERS = (AttentionLayer(0, 0.1, None, None), AttentionLayer(1, 0.1, 50.0, 10, has_sinks=True))
SHAPE = BatchShape(np.array([0, 1, 41, 44]), np.array([17, 3, 30]), np.arange(30).reshape(3, 10))


def main() -> None:
    """Walk a mixed step, and see that this mode would notice a mix of devices and a wait for the device."""
    _setup_privateuseone_for_python_backend("fakegpu")
    # A CPU build of torch pins no memory, and neither does FakeTensorMode.
    setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)  # noqa: B010
    with FakeTensorMode(allow_non_fake_inputs=True):
        cache = torch.empty(40, 2, 2, 2, 16, 128, dtype=torch.bfloat16, device="fakegpu")
        query, key = (torch.empty(heads, 44, 128, dtype=torch.bfloat16, device="fakegpu") for heads in (8, 2))
        batch = TritonAttention(cache, KVGeometry(8, 2, 128, LAYERS), 16, 132).prepare(SHAPE)
        sinks = torch.empty(8, dtype=torch.bfloat16, device="fakegpu")
        for layer in LAYERS:
            output = batch.attend(layer, query, key, key, sinks if layer.has_sinks else None)
            assert (output.shape, output.dtype, output.device) == ((44, 8, 128), torch.bfloat16, cache.device)
        with pytest.raises(AssertionError, match=r"tensors of one kernel lie on \['cpu', 'fakegpu:0'\]"):
            batch.attend(LAYERS[0], query, key, torch.empty(2, 44, 128, dtype=torch.bfloat16))
        with pytest.raises(DataDependentOutputException):
            output[0, 0, 0].item()


if __name__ == "__main__":
    main()
