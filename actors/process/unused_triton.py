"""Keeps triton out of processes that have no use for it."""

from __future__ import annotations

import os
import sys
from typing import Final

_IN_INTERPRETER: Final = "TRITON_INTERPRET"
"""Triton's own variable: its kernels run in its interpreter, without a GPU."""


def leave_out_triton() -> None:
    """Let this process find no triton from now on, if it has no GPU. Call it before transformers is imported.

    transformers imports torch's compiler, which imports triton wherever it is installed, as with every torch of PyPI
    for Linux, and only GPUs compute with it. Two engines on a CPU take 83 MiB less without it. In a process that has
    loaded triton already nothing changes.
    """
    # Imported here: torch reads how its threads wait when it is loaded (openmp.py).
    from kv_transfer.device_kind import find_accelerator

    if os.environ.get(_IN_INTERPRETER, "0") != "0" or find_accelerator() is not None:
        return
    # Python's import system does not import a module whose entry is None, and does not find it.
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # typeshed wants modules
