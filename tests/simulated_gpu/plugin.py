"""A plugin of pytest: every model is on the simulated GPU, whatever device and attention a test's settings name.

    python -m pytest -n 0 -p tests.simulated_gpu.plugin tests/actors/test_lora.py

So the tests of the engine, which compare tokens with transformers' own, walk the GPU's branches. A test
fails, too, if a link has touched blocks too early: the engines would recover from the link's end.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest
from torch import Tensor

from actors.model import loader
from actors.model.attention.backend import AttentionNeeds
from actors.model.loaded_runner import LoadedRunner
from actors.ranks import rank_group, rank_loop
from kv_transfer.config import KVTransferConfig
from kv_transfer.links import loopback_control
from kv_transfer.links.control_streams import Control
from kv_transfer.links.loopback_control import LoopbackControl, LoopbackHub
from kv_transfer.params import EngineAddress
from kv_transfer.sides import worker_side
from kv_transfer.transports.loopback import LoopbackTransport
from tests.simulated_gpu.block_order import ORDER
from tests.simulated_gpu.device import install
from tests.simulated_gpu.tensors import DeviceTensor
from tests.simulated_gpu.transport import FAULTS, SimulatedPipe

_AUTO = {"attention_backend": "auto", "key_order": "auto"}
_needs = LoadedRunner._needs


def pytest_configure() -> None:
    """Install the device before a test's modules are imported."""
    device = install()
    for module in (loader, rank_group, rank_loop):
        setattr(module, "choose_device", lambda model_config: device)  # noqa: B010
    setattr(LoadedRunner, "_needs", _needs_of_a_gpu)  # noqa: B010  # the settings of the tests are for CPUs
    setattr(worker_side, "make_transport", _make_transport)  # noqa: B010
    setattr(loopback_control, "Pipe", SimulatedPipe)  # noqa: B010


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Let a test fail if a link's thread has raised what no test has expected."""
    FAULTS.clear()
    yield
    assert not FAULTS, FAULTS


def _make_transport(
    config: KVTransferConfig, identity: EngineAddress, control: Control, kv_cache: Tensor, on_wedged: object
) -> LoopbackTransport:
    """Join the engines of this process. An engine of several ranks has no others here: its links are never opened."""
    assert isinstance(kv_cache, DeviceTensor)
    ORDER.watch(kv_cache.host)
    return LoopbackTransport(control.hub if isinstance(control, LoopbackControl) else LoopbackHub())


def _needs_of_a_gpu(runner: LoadedRunner) -> AttentionNeeds:
    runner._cache_config = runner._cache_config.model_copy(update=_AUTO)
    return _needs(runner)
