"""The choice of an NCCL, and the message when none, or more than one, is there."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import kv_transfer
from kv_transfer.errors import TransportUnavailable
from kv_transfer.transports.nccl_library import NcclReport, install_command, load_nccl, nccl_report

TORCHS = "/venv/nvidia/nccl/lib/libnccl.so.2"
SYSTEMS = "/usr/lib/x86_64-linux-gnu/libnccl.so.2.19.3"


@pytest.fixture
def maps(tmp_path: Path) -> Path:
    path = tmp_path / "maps"
    write_maps(path, TORCHS)
    return path


def write_maps(path: Path, *libraries: str) -> None:
    others = ("/venv/cupy_backends/cuda/libs/nccl.cpython-311.so", "/opt/libnccl-net.so", "/opt/libnccl-tuner.so", "")
    lines = [f"7f00-7f01 r-xp 00000000 08:01 42   {name}" for name in (*others, *libraries, *libraries)]
    path.write_text("\n".join(lines))


@pytest.fixture
def torch_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
    monkeypatch.delenv("NCCL_COMM_BLOCKING", raising=False)


def install_cupy(monkeypatch: pytest.MonkeyPatch, *, version: int = 22809, **changes: object) -> None:
    """A module in cupy's place, in this test only."""
    nccl = ModuleType("cupy.cuda.nccl")
    functions = ("get_unique_id", "NcclCommunicator", "groupStart", "groupEnd")
    nccl.__dict__.update(dict.fromkeys(functions, bytes), available=True, NCCL_UINT8=1, get_version=lambda: version)
    cupy = ModuleType("cupy")
    runtime = SimpleNamespace(runtimeGetVersion=lambda: changes.get("cuda", 13000))
    cupy.__dict__.update(__version__=changes.get("cupy", "14.2.0"), cuda=SimpleNamespace(runtime=runtime))
    nccl.__dict__["available"] = changes.get("available", True)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)


@pytest.mark.usefixtures("torch_for_cuda")
def test_one_library_for_both_is_fine(monkeypatch: pytest.MonkeyPatch, maps: Path) -> None:
    install_cupy(monkeypatch)
    assert nccl_report(maps) == NcclReport("2.28.9", "2.28.9", (TORCHS,), "")


@pytest.mark.usefixtures("torch_for_cuda")
def test_a_later_library_than_torch_was_built_with_is_fine(monkeypatch: pytest.MonkeyPatch, maps: Path) -> None:
    """torch names the version of the headers, cupy that of the library which is loaded."""
    install_cupy(monkeypatch, version=23007)
    assert nccl_report(maps) == NcclReport("2.28.9", "2.30.7", (TORCHS,), "")


@pytest.mark.usefixtures("torch_for_cuda")
def test_two_libraries_are_refused_with_both_paths(monkeypatch: pytest.MonkeyPatch, maps: Path) -> None:
    install_cupy(monkeypatch)
    write_maps(maps, TORCHS, SYSTEMS)
    report = nccl_report(maps)
    assert report.libnccl_paths == (SYSTEMS, TORCHS)
    assert report.problem == (f"two NCCL libraries are loaded, but torch and cupy must share one: {SYSTEMS}, {TORCHS}")


@pytest.mark.usefixtures("torch_for_cuda")
def test_an_older_library_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch, maps: Path) -> None:
    install_cupy(monkeypatch, version=21903)
    write_maps(maps, SYSTEMS)
    problem = nccl_report(maps).problem
    assert problem.startswith(f"cupy calls NCCL 2.19.3 ({SYSTEMS}), older than the 2.28.9 that torch needs")


@pytest.mark.usefixtures("torch_for_cuda")
def test_no_library_in_the_process_is_refused(monkeypatch: pytest.MonkeyPatch, maps: Path) -> None:
    install_cupy(monkeypatch)
    write_maps(maps)
    assert "no libnccl.so is mapped" in nccl_report(maps).problem


@pytest.mark.usefixtures("torch_for_cuda")
def test_without_cupy_the_install_command_is_said(monkeypatch: pytest.MonkeyPatch, maps: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    report = nccl_report(maps)
    assert report.torch_version == "2.28.9"
    assert report.problem.startswith("cupy is missing (")
    assert report.problem.endswith("pip install 'raypd[cuda13]'")


@pytest.mark.usefixtures("torch_for_cuda")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"available": False}, "cupy finds no libnccl.so.2; pip install 'raypd[cuda13]'"),
        ({"cupy": "13.6.0"}, "cupy 13.6.0 is too old; pip install 'raypd[cuda13]'"),
        (
            {"cuda": 12090},
            "cupy is built for CUDA 12, torch for 13.0; pip uninstall cupy-cuda12x && pip install 'raypd[cuda13]'",
        ),
    ],
)
def test_a_cupy_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, maps: Path, changes: dict[str, object], says: str
) -> None:
    install_cupy(monkeypatch, **changes)  # type: ignore[arg-type]  # names that it knows
    assert nccl_report(maps).problem == says


@pytest.mark.usefixtures("torch_for_cuda")
def test_the_mode_that_cupy_cannot_follow_is_refused(monkeypatch: pytest.MonkeyPatch, maps: Path) -> None:
    install_cupy(monkeypatch)
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    assert nccl_report(maps).problem == "NCCL_COMM_BLOCKING=0 is set, but cupy has no non-blocking mode; unset it"


def test_with_a_torch_for_the_cpu_cupy_is_not_even_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr("kv_transfer.transports.nccl_library._import_cupy", lambda: pytest.fail("cupy was imported"))
    assert nccl_report().problem.startswith("this torch is built for the CPU only; with a torch for CUDA, pip install")
    with pytest.raises(TransportUnavailable, match="'nccl' cannot run here: this torch is built for the CPU only"):
        load_nccl()


@pytest.mark.usefixtures("torch_for_cuda")
def test_what_is_loaded_are_cupys_functions(monkeypatch: pytest.MonkeyPatch, maps: Path) -> None:
    install_cupy(monkeypatch)
    monkeypatch.setattr("kv_transfer.transports.nccl_library.mapped_libraries", lambda maps: (TORCHS,))
    library = load_nccl()
    assert (library.version, library.uint8, library.make_unique_id()) == (22809, 1, b"")


def test_the_command_follows_torchs_cuda() -> None:
    assert install_command("12.8") == "pip install 'raypd[cuda12]'"


def test_importing_kv_transfer_imports_no_cupy() -> None:
    """An import statement anywhere, at any depth, would: cupy is only ever asked for by name, when it is needed."""
    for path in Path(kv_transfer.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "cupy"], path


def test_a_report_says_whose_library_it_is_or_what_is_wrong() -> None:
    shared = NcclReport("2.28.9", "2.28.9", ("/usr/lib/libnccl.so.2",))
    assert str(shared) == "nccl: torch for 2.28.9 and cupy 2.28.9 share /usr/lib/libnccl.so.2"
    assert str(NcclReport(problem="cupy is missing")) == "nccl: cupy is missing"
