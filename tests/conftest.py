from __future__ import annotations

import gc
import signal
from pathlib import Path

import hypothesis
import pytest

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("raypd", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("raypd")


def pytest_configure(config: pytest.Config) -> None:
    """Whoever was started in the background of a script ignores Ctrl-C, and so would all programs that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    only_hands_out_tests = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not only_hands_out_tests:
        config.pluginmanager.import_plugin("tests.model_fixtures")


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
