"""Asks torch and cupy about this machine's devices: `python -m actors.process.device_probe` prints the answer as JSON.

This is a program of its own because its caller, `raypd doctor`, must not load torch, and because a broken driver may
crash the process.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any


def probe_devices() -> dict[str, Any]:
    """Return what torch and cupy find, as a mapping for JSON.

    torch, cupy, nccl: their versions; None if they are missing
    cuda:   the CUDA version that torch was built for; None without CUDA
    gpus:   name, total_bytes and free_bytes of each GPU
    peers:  whether every GPU can access the memory of every other one; None for fewer than two GPUs
    errors: what failed, in words
    """
    facts: dict[str, Any] = {"torch": None, "cuda": None, "gpus": [], "peers": None, "cupy": None, "nccl": None}
    errors: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torch comes first, because cupy uses the NCCL library that is already loaded.
        for ask in (_ask_torch, _ask_cupy):
            try:
                facts |= ask()
            # A driver or a half-installed package may raise anything: every error becomes a finding.
            except Exception as error:
                errors.append(f"{ask.__name__.removeprefix('_ask_')}: {type(error).__name__}: {error}")
    return facts | {"errors": errors}


def _ask_torch() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if not torch.cuda.is_available():
        return facts
    count = torch.cuda.device_count()
    gpus = []
    for index in range(count):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        gpus.append({"name": torch.cuda.get_device_name(index), "free_bytes": free_bytes, "total_bytes": total_bytes})
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    peers = all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)
    return facts | {"gpus": gpus, "peers": peers if pairs else None}


def _ask_cupy() -> dict[str, Any]:
    try:
        import cupy  # type: ignore[import-not-found, unused-ignore]  # only where there are GPUs
        from cupy.cuda import nccl  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return {}
    return {"cupy": cupy.__version__, "nccl": nccl.get_version() if nccl.available else None}


def main() -> None:
    """Print the facts as JSON."""
    sys.stdout.write(json.dumps(probe_devices()))


if __name__ == "__main__":
    main()
