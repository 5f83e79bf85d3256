"""Let CPU engines attend with the Triton kernels, in Triton's interpreter.

The backend refuses a CPU, since nobody would want to serve like this. Nothing else differs: the kernels of the project
run in the engine's own steps, on its KV cache. Nothing happens in a process until it imports the backend, as only
engines do. TRITON_INTERPRET=1 has to be in the environment.

It is a plugin of pytest, too: the engines of a test process take the kernels, whatever a test's settings name.

    TRITON_INTERPRET=1 python -m pytest -n 0 -p tests.triton_on_cpu tests/integration/test_equality.py
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.own_process import TIMEOUT_S

if TYPE_CHECKING:
    from torch import Tensor

    from actors.model.attention.backend import AttentionNeeds
    from actors.model.attention.triton_backend import TritonBatch

_BACKEND: Final = "actors.model.attention.triton_backend"
_NUM_CHECKED: Final = 90
"""The longest context of the backend's check at its start. 700 tokens would take the interpreter a minute."""


def environment(directory: Path) -> dict[str, str]:
    """Return the variables for a cluster's first process. directory: empty; each process loads a file from there"""
    (directory / "sitecustomize.py").write_text("import tests.triton_on_cpu\n\ntests.triton_on_cpu.reach_in()\n")
    paths = [str(directory), str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}


def pytest_configure() -> None:
    """Change what the tests' engines are made of, before a test's modules are imported."""
    # Imported here: only engines, and processes of such tests, have torch.
    from actors.model.attention import triton_backend
    from actors.model.loaded_runner import LoadedRunner
    from tests import engine_pair

    take_cpus(vars(triton_backend))
    setattr(engine_pair, "_TIMEOUT_S", TIMEOUT_S)  # noqa: B010  # a step takes the interpreter a second
    needs, attend, turn = LoadedRunner._needs, triton_backend.TritonBatch.attend, threading.Lock()

    def needs_of_the_kernels(runner: LoadedRunner) -> AttentionNeeds:
        runner._cache_config = runner._cache_config.model_copy(
            update={"attention_backend": "triton", "key_order": "plain"}
        )
        return needs(runner)

    def attend_in_turn(batch: TritonBatch, *arguments: Any) -> Tensor:
        # The interpreter changes Triton's language for a whole process while it runs a kernel.
        with turn:
            return attend(batch, *arguments)

    setattr(LoadedRunner, "_needs", needs_of_the_kernels)  # noqa: B010  # for a whole process
    setattr(triton_backend.TritonBatch, "attend", attend_in_turn)  # noqa: B010


def reach_in() -> None:
    """Change the backend when this process imports it."""
    sys.meta_path.insert(0, _Finder())


def take_cpus(backend: Mapping[str, Any]) -> None:
    """Let the backend serve on a CPU what its kernels cover. backend: the names of its module"""
    # Imported here: only engines have torch.
    from actors.model.attention import backend_check

    setattr(backend["TritonKind"], "find_obstacle", lambda self, needs: backend["find_uncovered"](needs))  # noqa: B010
    mixed, long, whole_prompts = backend_check._BATCHES
    [request] = long.requests
    short = replace(long, requests=(replace(request, num_computed=_NUM_CHECKED),), longest_window=_NUM_CHECKED // 2)
    backend_check._BATCHES = (mixed, short, whole_prompts)


class _Patcher(Loader):
    """Runs the module, and then changes it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        take_cpus(vars(module))


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _BACKEND:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Patcher(spec.loader)
        return spec
