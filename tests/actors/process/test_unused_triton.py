"""A process without a GPU finds no triton, unless Triton's interpreter is to run its kernels."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from actors.process.unused_triton import leave_out_triton
from kv_transfer import device_kind


@pytest.fixture(autouse=True)
def _not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(device_kind, "find_accelerator", lambda: None)


def is_left_out() -> bool:
    """Whether triton is left out; also undoes it."""
    return sys.modules.pop("triton", sys) is None


def test_without_a_gpu_triton_is_not_found() -> None:
    leave_out_triton()
    assert importlib.util.find_spec("triton") is None
    with pytest.raises(ImportError):
        import triton  # noqa: F401
    assert is_left_out()


def test_with_a_gpu_triton_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_kind, "find_accelerator", lambda: torch.device("cuda"))
    leave_out_triton()
    assert not is_left_out()


@pytest.mark.parametrize(("value", "left_out"), [("1", False), ("0", True)])
def test_tritons_interpreter_needs_it(value: str, left_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    leave_out_triton()
    assert is_left_out() is left_out


def test_a_module_that_is_loaded_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", sys)
    leave_out_triton()
    assert sys.modules["triton"] is sys


@pytest.mark.more
def test_torchs_compiler_does_without_it() -> None:
    code = """
from actors.process.unused_triton import leave_out_triton
leave_out_triton()
import sys, torch
from transformers import AutoModelForCausalLM
compiled = torch.compile(lambda x: x.sin() + 1)
assert torch.allclose(compiled(torch.ones(8)), torch.ones(8).sin() + 1)
assert "torch._inductor" in sys.modules
assert not [name for name in sys.modules if name.startswith("triton.")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
