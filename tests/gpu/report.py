"""Runs everything that only a GPU can show, and writes a report: `python -m tests.gpu.report --out gpu.md` (or .json).

It runs tests/gpu, times decode steps eagerly and as graphs beside a copy within the device, and NCCL's ways of moving a
chunk. Without a GPU it says so in the report. The exit status is 1 if a test or a measurement failed, and 2 if nothing
could be run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.nccl import SelfSend
from kv_transfer.device_kind import find_accelerator
from kv_transfer.transports.nccl_library import load_nccl, nccl_report
from tests.gpu.decode_speed import LARGE, copy_bytes_per_s, measure_decode, seconds_per_call, write_config
from tests.gpu.report_figures import Report, read_outcomes, write_report

CASES = [(1, 512), (1, 4096), (8, 1024), (64, 1024), (256, 1024)]
_TESTS_TIMEOUT_S = 3600.0
"""Most of the time compiles kernels, which Triton keeps in its cache for the next run."""
_TESTS_RAN = (0, 1)
"""Pytest's status if it ran all tests, whether they passed or not."""
_CHUNK_BYTES = 32 << 20
_MESSAGE_BYTES = 4 << 20


def main(out: Annotated[Path, typer.Option(help="The report: a file that ends with .json or .md.")]) -> None:
    """Run, and write the report."""
    report = Report(machine=_machine())
    try:
        write_report(report, out)
    except (ValueError, OSError) as error:
        # A name that cannot be written is refused now, and not after ten minutes.
        raise typer.BadParameter(str(error), param_hint="--out") from error
    device = find_accelerator()
    if device is None:
        report.skipped.append("no CUDA device is visible")
    else:
        device = torch.device(device.type, 0)
        _attempt(report, "tests", lambda: run_tests(report))
        _attempt(report, "a copy within the device", lambda: _measure_copy(report, device))
        _attempt(report, "decode steps", lambda: _measure_decode(report))
        _attempt(report, "NCCL", lambda: _measure_links(report, device))
    write_report(report, out)
    typer.echo(report.to_markdown())
    raise typer.Exit(2 if device is None else int(bool(report.failures)))


def _attempt(report: Report, name: str, measure: Callable[[], None]) -> None:
    """Run a part; if it fails, the report says why, and the other parts run."""
    typer.echo(f"running: {name}")
    try:
        measure()
    except Exception as error:
        report.broken.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def _machine() -> dict[str, str]:
    facts = {"torch": torch.__version__, "CUDA": str(torch.version.cuda)}
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts |= {"GPUs": ", ".join(names), "NCCL": str(nccl_report())}
    return facts


def run_tests(report: Report) -> None:
    """Run the tests of this folder. Raises RuntimeError if pytest cannot run them."""
    with tempfile.TemporaryDirectory() as directory:
        junit = Path(directory) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "tests/gpu", f"--junit-xml={junit}"]
        status = subprocess.run(command, check=False, timeout=_TESTS_TIMEOUT_S).returncode
        if status not in _TESTS_RAN:
            raise RuntimeError(f"pytest ended with status {status}; its output says why")
        report.correctness = read_outcomes(junit)


def _measure_copy(report: Report, device: torch.device) -> None:
    report.copy_bytes_per_s = copy_bytes_per_s(device)


def _measure_decode(report: Report) -> None:
    with tempfile.TemporaryDirectory() as directory:
        report.decode = measure_decode(write_config(Path(directory), LARGE, 8192), CASES)


def _measure_links(report: Report, device: torch.device) -> None:
    if problem := nccl_report().problem:
        report.skipped.append(f"NCCL: {problem}")
        return
    source, target = (torch.zeros(_CHUNK_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    with SelfSend(load_nccl(), device) as link:
        calls: dict[str, Callable[[], object]] = {
            "plain copy": lambda: link.stream.copy([target], [source]),
            "NCCL to itself": lambda: link.move(source, target, _MESSAGE_BYTES),
        }
        report.links = {name: _CHUNK_BYTES / seconds_per_call(device, call, 50) for name, call in calls.items()}


if __name__ == "__main__":
    typer.run(main)
