from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from actors.model import loaded_runner
from actors.model.errors import KVCacheTooLarge
from actors.model.loaded_runner import LoadedRunner


@pytest.mark.parametrize("settings", [{"kv_cache_memory_gib": 1e6}, {"num_blocks": 10**9}])
def test_more_than_the_machine_has_is_refused_with_the_figures(
    checkpoint: Callable[[str], Path], settings: dict[str, float]
) -> None:
    loaded = LoadedRunner.load(
        ModelConfig(model=str(checkpoint("gpt2")), device="cpu"),
        CacheConfig.model_validate(settings),
        SchedulerConfig(),
        ParallelConfig(),
    )

    with pytest.raises(
        KVCacheTooLarge, match=r"the KV cache needs [0-9.]+ GiB, \d+ blocks of \d+ bytes; [0-9.]+ GiB are free"
    ):
        loaded.determine_num_blocks()


def test_the_profiling_run_sizes_the_cache_by_free_memory(checkpoint: Callable[[str], Path]) -> None:
    loaded = LoadedRunner.load(
        ModelConfig(model=str(checkpoint("gpt2")), device="cpu"),
        CacheConfig(memory_fraction=0.5),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=700),
        ParallelConfig(),
    )

    assert loaded.determine_num_blocks() == 4 * 4 * (512 // 16)


@pytest.mark.parametrize(("free_bytes", "is_run"), [(1 << 40, False), (1 << 21, True)])
def test_the_largest_batch_is_run_on_a_cpu_only_where_memory_may_be_too_little(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, free_bytes: int, is_run: bool
) -> None:
    runs: list[None] = []
    monkeypatch.setattr(loaded_runner, "free_memory_bytes", lambda device: free_bytes)
    monkeypatch.setattr(LoadedRunner, "_run_largest_batch", lambda self: runs.append(None))
    loaded = LoadedRunner.load(
        ModelConfig(model=str(checkpoint("gpt2")), device="cpu"),
        CacheConfig(memory_fraction=0.5),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=700),
        ParallelConfig(),
    )

    assert 0 < loaded.determine_num_blocks() <= 4 * 4 * (512 // 16)
    assert bool(runs) is is_run
