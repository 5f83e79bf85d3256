"""Arrays are uploaded in one piece; on a CPU there is nothing to copy. (checked.py has the tests with a device.)"""

from __future__ import annotations

import numpy as np
import torch

from actors.model.uploads import upload


def test_on_a_cpu_tensors_share_the_arrays_memory() -> None:
    arrays = [np.arange(5), np.arange(6).reshape(2, 3)]
    uploaded = upload(arrays, torch.device("cpu"))
    for array, tensor in zip(arrays, uploaded, strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert np.shares_memory(tensor.numpy(), array)
