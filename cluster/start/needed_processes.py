"""Leaves out the processes of a local Ray cluster that raypd does not use.

Beside its servers Ray starts a dashboard, an agent of the dashboard, a monitor for its autoscaler, and one for log
files: four Python processes, each of which imports Ray. ray.init() waits for the first two. In a cluster that listens
on loopback, asks for a random token and ends with its driver, nobody calls these two, there are no nodes to add, and
nobody prints the workers' logs. Ray has no options for that, so a few of its functions are replaced while ray.init()
runs. Versions of Ray with which this was not tested start as they are.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

_TESTED: Final = "2.60."
_AGENT_OPTION: Final = "--dashboard_agent_command="
_STAND_IN: Final = Path(__file__).with_name("agent_stand_in.py")


@contextmanager
def only_needed_processes() -> Iterator[None]:
    """Let ray.init() start within this context only the processes that a local raypd cluster needs.

    These are Ray's head (GCS), the raylet, the agent of runtime environments, and the workers. Such a cluster has no
    dashboard, no state API, no `ray status`, and no metrics of Ray; raypd's own do not depend on Ray's.
    """
    import ray
    from ray._private import node, services, utils

    if not ray.__version__.startswith(_TESTED):
        logger.info("all of Ray's processes are started", extra={"ray_version": ray.__version__})
        yield
        return
    start_ray_process: Callable[..., Any] = services.start_ray_process

    def start(command: Sequence[str], *arguments: Any, **options: Any) -> Any:
        return start_ray_process(with_stand_in(command), *arguments, **options)

    with ExitStack() as at_the_end:
        # Ray takes (None, None) as an optional dashboard that could not be started.
        _replace(services, "start_api_server", lambda *_, **__: (None, None), at_the_end)
        _replace(services, "start_ray_process", start, at_the_end)
        # The start of the raylet imports the dashboard's packages here, only to see whether they are installed.
        _replace(utils, "get_dashboard_dependency_error", lambda: ImportError("not needed"), at_the_end)
        _replace(node.Node, "start_monitor", lambda _: None, at_the_end)
        _replace(node.Node, "start_log_monitor", lambda _: None, at_the_end)
        yield


def with_stand_in(command: Sequence[str]) -> list[str]:
    """Return a command of Ray's; if it starts a raylet, with agent_stand_in.py as the dashboard's agent.

    The raylet refuses to start without an agent, and ends when the agent ends.
    """
    options = dict(argument.split("=", 1) for argument in command if "=" in argument)
    if _AGENT_OPTION.rstrip("=") not in options:
        return list(command)
    stand_in = [sys.executable, "-I", "-S", str(_STAND_IN), options["--session_dir"], options["--node_id"]]
    agent = _AGENT_OPTION + subprocess.list2cmdline(stand_in)
    return [agent if argument.startswith(_AGENT_OPTION) else argument for argument in command]


def _replace(owner: Any, name: str, function: Callable[..., Any], at_the_end: ExitStack) -> None:
    at_the_end.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, function)
