"""The canary between engines that really hand over: one that computes other KV is found, one that rounds is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.config import EngineConfig, ModelConfig
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.engine_server import EngineServer
from cluster.errors import CanaryFailed
from cluster.routing.engine_connection import EngineRole
from cluster.sessions import canary
from cluster.sessions.canary import run_canary
from kv_transfer.config import KVTransferConfig
from tests.engine_pair import engine_config
from tests.integration.local_cluster import LocalCluster, local_cluster

pytestmark = pytest.mark.timeout(120)


def config_of(directory: Path, dtype: str) -> EngineConfig:
    config = engine_config(directory, transfer=KVTransferConfig())
    # Packed weights are no parameters, so nothing could change them.
    model = ModelConfig(model=str(directory), dtype=dtype, device="cpu", weight_packing="none")
    return config.model_copy(update={"model": model})


def parameters(engine: EngineServer) -> Iterable[tuple[str, torch.Tensor]]:
    """The engine's weights."""
    executor: Any = engine._core and engine._core.executor
    for part in vars(executor._worker.runner._model.forward).values():
        if isinstance(part, torch.nn.Module):
            yield from part.named_parameters()


def change(engine: EngineServer, names: str, by: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the weights whose names contain this."""
    changed = [parameter for name, parameter in parameters(engine) if names in name]
    assert changed, [name for name, _ in parameters(engine)]
    with torch.no_grad():
        for parameter in changed:
            parameter.copy_(by(parameter))


async def prove(cluster: LocalCluster) -> None:
    by_role = {engine.descriptor.role: engine for engine in cluster.pool.snapshot()}
    facts = cluster.engines["decode-0"].facts
    await run_canary(by_role[EngineRole.PREFILL], by_role[EngineRole.DECODE], facts, timeout_s=60)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_engines_that_compute_the_same_are_proven_and_one_with_other_kv_is_found(
    checkpoint: Callable[[str], Path], dtype: str
) -> None:
    async with local_cluster(config_of(checkpoint("llama"), dtype)) as cluster:
        await prove(cluster)
        change(cluster.engines["prefill-0"], "v_proj", lambda weight: weight.roll(1, dims=0))
        with pytest.raises(CanaryFailed, match="the two engines do not compute the same"):
            await prove(cluster)


async def test_a_pair_that_rounds_otherwise_is_proven_in_16_bits_though_tokens_differ(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_differing, read_forced = 0, canary._read_forced

    async def count(*arguments: Any) -> list[TokenLogprobs]:
        nonlocal num_differing
        num_differing += 1
        return await read_forced(*arguments)

    monkeypatch.setattr(canary, "_read_forced", count)
    generator = torch.Generator().manual_seed(7)

    def noisy(weight: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(weight.shape, generator=generator).to(weight.dtype) - 0.5
        return weight * (1 + noise / 64)

    async with local_cluster(config_of(checkpoint("llama"), "bfloat16")) as cluster:
        for _ in range(5):
            change(cluster.engines["prefill-0"], "proj", noisy)
            await prove(cluster)
    assert num_differing >= 2
