from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Final

import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from tests.patience import TEST_S

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("raypd", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("raypd")

# A call to Ray from a process that is in no cluster fails: it would start one, and end the process once that is gone.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

# Engines of tests neither read nor write the user's files of what steps take.
_CACHE_ROOT: Final = tempfile.mkdtemp(prefix="raypd-test-cache-")
os.environ["RAYPD_CACHE_ROOT"] = _CACHE_ROOT
atexit.register(shutil.rmtree, _CACHE_ROOT, ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    """Restore Ctrl-C: a process in the background of a script ignores it, and so would programs that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    only_hands_out_tests = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not only_hands_out_tests:
        config.pluginmanager.import_plugin("tests.model_fixtures")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests have noted by record_property("figure", text), which pytest keeps to itself."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    figures = [text for report in reports for name, text in getattr(report, "user_properties", []) if name == "figure"]
    if figures:
        terminalreporter.section("figures")
        for text in figures:
            terminalreporter.write_line(str(text))


def pytest_collection_finish() -> None:
    """Thousands of tests and the libraries that they import stay: no collection of garbage has to walk them again."""
    gc.collect()
    gc.freeze()
    _let_logs_go_up()


def _let_logs_go_up() -> None:
    """pytest attaches itself to every logger whose messages stay, six times a test: torch has 50 of them."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == "torch":
            logger.propagate = True


_FORKING: Final = ("faults/", "actors/test_multi_rank_engine.py", "kv_transfer/transports/test_tcp_processes.py")
"""They start processes by tests.fork_server, which takes 6 s of processor time itself: a busy machine's minutes."""
_ONE_CLUSTER: Final = ("integration/serve/",)
_APART: Final = ("simulated_gpu/test_simulated_gpu.py",)
"""Each of their tests takes minutes in a process of its own."""
_FIRST: Final = (
    *("soak/test_soak.py", "integration/test_ray_nodes.py", *_ONE_CLUSTER, "chaos/test_chaos.py"),
    *_APART,
    *_FORKING,
)


_ALONE: Final = ("faults/", "hosts/")
"""The folders in which `make test-alone` looks for its tests: to collect all tests takes longer than some of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run first what takes minutes: in the end no process waits for another."""
    items.sort(key=lambda item: _rank(_file_of(item)))
    for item in items:
        if item.get_closest_marker("alone") is not None and not _file_of(item).startswith(_ALONE):
            raise pytest.UsageError(f"{item.nodeid} is marked alone: name its folder in the Makefile's test-alone, too")
        if _file_of(item).startswith(_FORKING) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_S))


def _file_of(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).as_posix()


def _rank(file: str) -> int:
    return next((rank for rank, prefix in enumerate(_FIRST) if file.startswith(prefix)), len(_FIRST))


class _Together(LoadFileScheduling):  # type: ignore[misc]  # it has no types
    """Files that share what is expensive are run by one process, as the tests of one file are."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        if file.removeprefix("tests/").startswith(_APART):
            return nodeid
        shared = (files for files in (_FORKING, _ONE_CLUSTER) if file.removeprefix("tests/").startswith(files))
        return next(shared, (file,))[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    return _Together(config, log) if config.getoption("dist") == "loadfile" else None
