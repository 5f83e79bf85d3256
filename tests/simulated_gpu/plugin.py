"""A plugin of pytest: every model is on the simulated GPU, whatever device and attention a test's settings name.

    python -m pytest -n 0 -p tests.simulated_gpu.plugin tests/actors/test_lora.py

So the tests of the engine, which compare tokens with transformers' own, walk the GPU's branches.
"""

from __future__ import annotations

from actors.model import loader
from actors.model.attention.backend import AttentionNeeds
from actors.model.loaded_runner import LoadedRunner
from tests.simulated_gpu.device import install

_AUTO = {"attention_backend": "auto", "key_order": "auto"}
_needs = LoadedRunner._needs


def pytest_configure() -> None:
    """Install the device before a test's modules are imported."""
    device = install()
    setattr(loader, "choose_device", lambda model_config: device)  # noqa: B010
    setattr(LoadedRunner, "_needs", _needs_of_a_gpu)  # noqa: B010  # the settings of the tests are for CPUs


def _needs_of_a_gpu(runner: LoadedRunner) -> AttentionNeeds:
    runner._cache_config = runner._cache_config.model_copy(update=_AUTO)
    return _needs(runner)
