"""Fixtures of everything that runs models. To import what these need takes seconds, so who runs no tests does not."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.config import ModelConfig
from actors.model import loaded_runner
from actors.model.forward import FlatForward
from actors.model.loader import LoadedModel, load_model
from actors.model.tensor_parallel.group import TensorParallelGroup
from tests.checkpoints import make_checkpoint
from tests.vision import VISION_FAMILIES, make_vision_checkpoint


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

    For engines that change no weights: a forward leaves nothing in its model. Engines that step on threads of their own
    take turns with a model, because it computes one forward at a time. Ranks have models of their own: within a forward
    they wait for each other.
    """
    forward, turns = FlatForward.__call__, collections.defaultdict[int, threading.Lock](threading.Lock)

    def compute(self: FlatForward, *args: Any, **kwargs: Any) -> Tensor:
        with turns[id(self)]:
            return forward(self, *args, **kwargs)

    monkeypatch.setattr(FlatForward, "__call__", compute)

    def load(model_config: ModelConfig, group: TensorParallelGroup | None = None) -> LoadedModel:
        return load_once(model_config) if group is None else load_model(model_config, group)

    monkeypatch.setattr(loaded_runner, "load_model", load)
