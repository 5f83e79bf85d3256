"""Finds the NCCL library that cupy calls, and makes sure that it is the one that torch has loaded.

cupy brings no NCCL of its own. It takes a libnccl that is mapped into the process already, and looks for one only if
none is; so torch is imported first, and both use one copy. Two copies in one process would each act as the owner of the
device: that is refused here, before anything is launched. cupy is imported only when it is needed: a CPU engine never
loads it.
"""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Protocol

import torch

from kv_transfer.errors import TransportUnavailable

_LIBRARY: Final = re.compile(r"/\S*/libnccl\.so(?:\.\d+)*$")
_MIN_CUPY_MAJOR: Final = 14
"""The first major version of cupy whose unique ids are bytes."""


class NcclComm(Protocol):
    """The part of cupy.cuda.nccl.NcclCommunicator that is used here. Addresses and streams are plain integers.

    Any method may raise NcclError (a RuntimeError), or KeyError for a code that cupy does not know.
    """

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int, /) -> None:
        """Queue a message, inside a group. Only the first connection may block, at the group's end."""

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int, /) -> None:
        """Queue a receive, inside a group."""

    def check_async_error(self) -> None:
        """Raise the error that has occurred in the background, if there is one."""

    def abort(self) -> None:
        """Free the communicator; its kernels leave the device. This may hang."""


@dataclass(frozen=True, slots=True)
class NcclLibrary:
    """The functions and values of cupy.cuda.nccl that are used.

    init_rank: (number of ranks, unique id, rank) -> communicator; it has no timeout
    """

    version: int
    uint8: int
    make_unique_id: Callable[[], bytes]
    init_rank: Callable[[int, bytes, int], NcclComm]
    group_start: Callable[[], None]
    group_end: Callable[[], None]


@dataclass(frozen=True, slots=True)
class NcclReport:
    """The facts about NCCL that `raypd status` shows.

    torch_version: of the NCCL that torch was built with, such as "2.28.9"; empty if torch is built for the CPU
    cupy_version:  of the NCCL that cupy calls; empty if cupy or NCCL is missing
    libnccl_paths: the libnccl files that are mapped into this process
    problem:       why the nccl transport cannot run here, and what to do; empty if it can
    """

    torch_version: str = ""
    cupy_version: str = ""
    libnccl_paths: tuple[str, ...] = ()
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"nccl: {self.problem}"
        return (
            f"nccl: torch for {self.torch_version} and cupy {self.cupy_version} share {', '.join(self.libnccl_paths)}"
        )


def nccl_report(maps: Path = Path("/proc/self/maps")) -> NcclReport:
    """Examine the installed NCCL and cupy. cupy is imported only if torch is built for CUDA.

    maps: the list of this process's mapped files
    """
    cuda_version = torch.version.cuda
    if cuda_version is None:
        return NcclReport(problem=f"this torch is built for the CPU only; {install_command(None)}")
    # torch has no types for this call. A fourth part of the version would be a suffix.
    torch_version = tuple(int(part) for part in torch.cuda.nccl.version()[:3])  # type: ignore[no-untyped-call]
    try:
        cupy, nccl = _import_cupy()
    except ImportError as error:
        return NcclReport(_dotted(torch_version), problem=f"cupy is missing ({error}); {install_command(cuda_version)}")
    if not nccl.available:
        problem = f"cupy finds no libnccl.so.2; {install_command(cuda_version)}"
        return NcclReport(_dotted(torch_version), problem=problem)
    cupy_version = _decode(nccl.get_version())
    paths = mapped_libraries(maps)
    problem = _find_problem(torch_version, cupy_version, paths) or _find_wrong_cupy(cupy, cuda_version)
    return NcclReport(_dotted(torch_version), _dotted(cupy_version), paths, problem)


def load_nccl() -> NcclLibrary:
    """Return the library, after the checks of nccl_report(). Raises TransportUnavailable, with what is missing."""
    report = nccl_report()
    if report.problem:
        raise TransportUnavailable(f"kv_transfer.transport = 'nccl' cannot run here: {report.problem}")
    _, nccl = _import_cupy()
    return NcclLibrary(
        version=nccl.get_version(),
        uint8=nccl.NCCL_UINT8,
        make_unique_id=nccl.get_unique_id,
        init_rank=nccl.NcclCommunicator,
        group_start=nccl.groupStart,
        group_end=nccl.groupEnd,
    )


def install_command(cuda_version: str | None) -> str:
    """Return the command that installs the cupy that fits torch: only one cupy may be installed.

    cuda_version: the version that torch is built for; None: for the CPU
    """
    if cuda_version is None:
        return "with a torch for CUDA, pip install 'raypd[cuda12]' or 'raypd[cuda13]' as torch.version.cuda says"
    return f"pip install 'raypd[cuda{cuda_version.partition('.')[0]}]'"


def mapped_libraries(maps: Path) -> tuple[str, ...]:
    """Return the libnccl files in a list of mappings, each once; not cupy's extension module, nor NCCL's plugins."""
    paths = {match.group() for line in maps.read_text().splitlines() if (match := _LIBRARY.search(line))}
    return tuple(sorted(paths))


def _import_cupy() -> tuple[ModuleType, Any]:  # Any: cupy has no type stubs
    with warnings.catch_warnings():
        # cupy warns if there is no libnccl, but nccl.available reports that too.
        warnings.simplefilter("ignore")
        return importlib.import_module("cupy"), importlib.import_module("cupy.cuda.nccl")


def _find_problem(torch_version: tuple[int, ...], cupy_version: tuple[int, ...], paths: tuple[str, ...]) -> str:
    if len(paths) > 1:
        return f"two NCCL libraries are loaded, but torch and cupy must share one: {', '.join(paths)}"
    if not paths:
        return "no libnccl.so is mapped into this process, so torch and cupy do not share one"
    if cupy_version < torch_version:
        # torch reports the NCCL version that it was compiled with. A later library works with torch; an earlier one
        # lacks symbols.
        return (
            f"cupy calls NCCL {_dotted(cupy_version)} ({paths[0]}), older than the {_dotted(torch_version)} that torch "
            "needs: an old libnccl comes before torch's own on the library path"
        )
    if os.environ.get("NCCL_COMM_BLOCKING") == "0":
        return "NCCL_COMM_BLOCKING=0 is set, but cupy has no non-blocking mode; unset it"
    return ""


def _find_wrong_cupy(cupy: Any, cuda_version: str) -> str:
    if int(cupy.__version__.partition(".")[0]) < _MIN_CUPY_MAJOR:
        return f"cupy {cupy.__version__} is too old; {install_command(cuda_version)}"
    cupy_cuda_major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    if str(cupy_cuda_major) != cuda_version.partition(".")[0]:
        return (
            f"cupy is built for CUDA {cupy_cuda_major}, torch for {cuda_version}; "
            f"pip uninstall cupy-cuda{cupy_cuda_major}x && {install_command(cuda_version)}"
        )
    return ""


def _decode(version: int) -> tuple[int, int, int]:
    """Split an NCCL version: since 2.9, NCCL's NCCL_VERSION() makes it of major * 10000 + minor * 100 + patch."""
    return version // 10000, version // 100 % 100, version % 100


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
