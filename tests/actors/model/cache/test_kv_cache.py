"""Tests of actors/model/cache/host_memory.py, actors/model/cache/kv_cache_size.py, actors/model/cache/memory.py."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.config import CacheConfig, SchedulerConfig
from actors.model.cache.kv_cache import allocate_kv_cache
from actors.model.cache.kv_cache_size import choose_num_blocks
from actors.model.cache.memory import free_memory_bytes
from actors.model.errors import KVCacheTooSmall
from kv_transfer.layout import KVCacheLayout
from kv_transfer.transports.shared_pool import open_pool
from tests.actors.model.stepping import make_runner

GIB = 1 << 30
LAYOUT = KVCacheLayout(
    num_blocks=3,
    num_kv_heads=2,
    num_layers=2,
    block_size=4,
    head_dim=8,
    dtype="bfloat16",
    dtype_size_bytes=2,
    model_fingerprint="",
)


def choose(
    cache_config: CacheConfig,
    *,
    free_memory_bytes: int = 0,
    max_model_len: int = 256,
    max_num_seqs: int = 2,
    is_gpu: bool = True,
    num_threads: int = 1,
    num_state_blocks: int = 0,
) -> int:
    return choose_num_blocks(
        cache_config,
        SchedulerConfig(max_num_seqs=max_num_seqs),
        block_size_bytes=1 << 20,
        max_model_len=max_model_len,
        free_memory_bytes=free_memory_bytes,
        is_gpu=is_gpu,
        num_threads=num_threads,
        num_state_blocks=num_state_blocks,
    )


def test_the_first_setting_that_is_given_decides() -> None:
    everything = CacheConfig(num_blocks=5, kv_cache_memory_gib=1, memory_fraction=0.5)

    assert choose(everything, free_memory_bytes=GIB) == 5
    assert choose(everything.model_copy(update={"num_blocks": None}), free_memory_bytes=GIB) == 1024
    assert choose(CacheConfig(memory_fraction=0.0625), free_memory_bytes=GIB) == 64


def test_a_fraction_is_cut_at_what_the_largest_batches_can_use() -> None:
    assert choose(CacheConfig(memory_fraction=0.5), free_memory_bytes=1000 * GIB) == 4 * 2 * 16


def test_on_a_cpu_a_fraction_is_cut_at_a_likely_number_of_tokens() -> None:
    everything = CacheConfig(memory_fraction=0.5)

    assert choose(everything, free_memory_bytes=10**6 * GIB, max_num_seqs=256, is_gpu=True) == 4 * 256 * 16
    assert choose(everything, free_memory_bytes=10**6 * GIB, max_num_seqs=256, is_gpu=False) == 24_576 // 16
    assert choose(everything, free_memory_bytes=10**6 * GIB, max_num_seqs=2, is_gpu=False) == 4 * 2 * 16


def test_every_sequence_needs_room_for_its_recurrent_state_too() -> None:
    everything = CacheConfig(memory_fraction=0.5)
    assert choose(everything, free_memory_bytes=1000 * GIB, num_state_blocks=100) == 4 * 2 * (16 + 100)
    huge = 10**6 * GIB
    assert (
        choose(everything, free_memory_bytes=huge, max_num_seqs=256, is_gpu=False, num_state_blocks=100)
        == 24_576 // 16 + 16 * 100
    )
    with pytest.raises(KVCacheTooSmall, match="needs 116 blocks"):
        choose(CacheConfig(kv_cache_memory_gib=115 / 1024), num_state_blocks=100)
    with pytest.raises(KVCacheTooSmall, match="num_blocks is 5, but the recurrent state of one request takes 5"):
        choose(CacheConfig(num_blocks=5), num_state_blocks=5)


def test_on_a_cpu_more_tokens_are_likely_with_more_threads() -> None:
    everything = CacheConfig(memory_fraction=0.5)

    for is_gpu, num_blocks in ((False, 3 * 24_576 // 16), (True, 4 * 256 * 16)):
        found = choose(everything, free_memory_bytes=10**6 * GIB, max_num_seqs=256, is_gpu=is_gpu, num_threads=3)
        assert found == num_blocks


def test_on_a_cpu_four_sequences_of_full_length_are_likely() -> None:
    long = choose(
        CacheConfig(memory_fraction=0.5),
        free_memory_bytes=10**6 * GIB,
        max_model_len=131_072,
        max_num_seqs=256,
        is_gpu=False,
    )
    assert long == 4 * 131_072 // 16


def test_a_size_that_a_setting_names_is_not_cut_on_a_cpu() -> None:
    assert choose(CacheConfig(kv_cache_memory_gib=20), max_num_seqs=256, is_gpu=False) == 20 * 1024
    assert choose(CacheConfig(num_blocks=100_000), max_num_seqs=256, is_gpu=False) == 100_000


def test_less_than_one_sequence_is_refused_with_the_figures() -> None:
    with pytest.raises(KVCacheTooSmall, match=r"15 blocks of 1048576.*needs 16 blocks"):
        choose(CacheConfig(memory_fraction=0.5), free_memory_bytes=31 << 20)
    with pytest.raises(KVCacheTooSmall, match="raise kv_cache_memory_gib"):
        choose(CacheConfig(kv_cache_memory_gib=0.001))


def test_the_cache_has_the_layout_that_links_agree_on(checkpoint: Callable[[str], Path]) -> None:
    runner = make_runner(checkpoint("qwen3"), block_size=8, num_blocks=10, dtype="bfloat16")

    assert tuple(runner.kv_cache.shape) == runner.layout.shape == (10, 2, 3, 2, 8, 16)
    assert runner.kv_cache.dtype == torch.bfloat16
    assert runner.layout.dtype == "bfloat16"
    assert runner.layout.block_size_bytes == runner.kv_cache[0].numel() * 2
    assert runner.kv_cache.is_contiguous()


def test_free_memory_is_between_nothing_and_a_lot() -> None:
    assert 1 << 20 < free_memory_bytes(torch.device("cpu")) < 1 << 50


def test_a_cache_on_the_cpu_can_be_mapped_by_other_processes() -> None:
    fd = open_pool(allocate_kv_cache(LAYOUT, torch.device("cpu")))
    assert fd is not None
    os.close(fd)


def test_a_cache_that_cannot_be_shared_is_private_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError(errno.EPERM, "not in this sandbox")

    monkeypatch.setattr(os, "memfd_create", refuse)
    cache = allocate_kv_cache(LAYOUT, torch.device("cpu"))
    assert (tuple(cache.shape), cache.dtype, bool(cache.any())) == (LAYOUT.shape, torch.bfloat16, False)
    assert open_pool(cache) is None
    (record,) = caplog.records
    assert (record.levelname, vars(record)["reason"]) == ("WARNING", "[Errno 1] not in this sandbox")
