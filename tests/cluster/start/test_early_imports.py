"""Imports that a start makes before Ray runs, and imports that it leaves to the processes that need them.

Tests of cluster/start/local_ray.py, cluster/pool/planning/planner_child.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest

_IMPORT: Final = """
import sys
from cluster.config import ClusterConfig
from cluster.start.local_ray import import_ray
before = "ray" in sys.modules
import_ray(ClusterConfig.model_validate({{"ray": {{"address": {address!r}}}}}))
from ray._raylet import AuthenticationMode, get_authentication_mode
print(before, "ray" in sys.modules, get_authentication_mode() == AuthenticationMode.TOKEN)
"""


def _run(code: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True)
    return ran.stdout.strip()


@pytest.mark.parametrize(("address", "asks_for_token"), [(None, True), ("10.0.0.1:6379", False)])
def test_ray_is_imported_after_the_variables_that_it_reads_are_set(address: str | None, asks_for_token: bool) -> None:
    assert _run(_IMPORT.format(address=address)) == f"False True {asks_for_token}"


def test_the_driver_and_the_controller_load_no_simulator_and_no_torch() -> None:
    code = """
import sys, cluster.pool.controller.controller
print([name for name in sys.modules if name in ("torch", "transformers") or name.startswith("cluster.simulation")])
"""
    assert _run(code) == "[]"
