from __future__ import annotations

import functools
import gc
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from actors.config import ModelConfig
from actors.model import model_runner
from actors.model.loader import LoadedModel, load_model
from actors.model.tensor_parallel_group import TensorParallelGroup
from tests.checkpoints import make_checkpoint
from tests.vision import VISION_FAMILIES, make_vision_checkpoint

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("raypd", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("raypd")


def pytest_configure() -> None:
    """Whoever was started in the background of a script ignores Ctrl-C, and so would all programs that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Thousands of tests and the libraries that they import stay: no collection of garbage has to walk them again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


_LONGEST = ("soak/test_soak.py", "integration/test_ray_nodes.py", "integration/test_ray_life.py", "chaos/test_chaos.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take a minute and more come first: in the end no process waits for another."""
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a family's checkpoint, made at its first use."""
    root = tmp_path_factory.mktemp("checkpoints")

    def directory_of(family: str) -> Path:
        directory = root / family
        make = make_vision_checkpoint if family in VISION_FAMILIES else make_checkpoint
        return directory if directory.exists() else make(family, directory)

    return directory_of


@pytest.fixture(scope="session")
def load_once() -> Callable[[ModelConfig], LoadedModel]:
    return functools.cache(load_model)


@pytest.fixture
def shared_models(load_once: Callable[[ModelConfig], LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of one rank have a checkpoint's model together: a fifth of such tests was loading the same one again.

    For engines that one thread steps, and that change no weights: a forward leaves nothing in its model.
    """

    def load(model_config: ModelConfig, group: TensorParallelGroup | None = None) -> LoadedModel:
        return load_once(model_config) if group is None else load_model(model_config, group)

    monkeypatch.setattr(model_runner, "load_model", load)
