"""A running cluster as its driver sees it: brought up, watched, drained, gone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

from rich.console import Console

from cluster import local_ray
from cluster.config import ClusterConfig
from cluster.errors import CannotStart

_POLL_TIMEOUT_S = 30.0


def serve_until_signalled(config: ClusterConfig, console: Console) -> None:
    """Start the cluster, print its addresses, and drain it on SIGINT or SIGTERM. Raises CannotStart."""
    stop = threading.Event()
    with running_cluster(config, console, stop) as address:
        if address is None:
            return
        console.print(
            f"[bold green]ready[/] model {config.model_name!r} at {address} (gRPC, raypd.v1)  "
            f"prefill {config.prefill.count}, decode {config.decode.count}, both {config.both.count}",
            soft_wrap=True,
        )
        stop.wait()
        console.print("draining")
    console.print("stopped")


@contextmanager
def running_cluster(
    config: ClusterConfig, console: Console, stop: threading.Event | None = None
) -> Iterator[str | None]:
    """A started cluster's ingress address, or None if `stop` was set meanwhile; the cluster ends with the block.

    stop: if given, SIGINT and SIGTERM set it, instead of interrupting
    The driver owns the controller, the controller owns everything else: if the driver dies, nothing is left behind.
    """
    config = local_ray.connect(config)
    # After connecting: Ray sets a SIGTERM handler of its own.
    signals = _signals_set(stop) if stop is not None else nullcontext()
    with _disconnect_at_the_end(), signals:
        import ray

        from cluster.pool.controller import CONTROLLER_NAME, Controller

        controller: Any = ray.remote(Controller).options(name=CONTROLLER_NAME, num_cpus=0).remote(config)
        try:
            yield _start(controller, console, stop or threading.Event())
        finally:
            _stop(controller, config.drain_timeout_s + 60)


@contextmanager
def _disconnect_at_the_end() -> Iterator[None]:
    try:
        yield
    finally:
        local_ray.disconnect()


def _start(controller: Any, console: Console, stop: threading.Event) -> str | None:
    """Show the controller's progress until it is up."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    starting = controller.start.remote()
    num_events = 0
    with console.status("starting"):
        while not stop.is_set():
            done, _ = ray.wait([starting], timeout=0.0)
            events = ray.get(controller.progress.remote(num_events), timeout=_POLL_TIMEOUT_S)
            num_events += len(events)
            for event in events:
                console.print(f"  {event}", highlight=False, soft_wrap=True)
            if done:
                try:
                    return str(ray.get(starting))
                except RayTaskError as error:
                    raise CannotStart(str(error.cause)) from error
                except RayActorError as error:
                    raise CannotStart(f"the controller died: {error}") from error
    return None


def _stop(controller: Any, timeout_s: float) -> None:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        ray.get(controller.stop.remote(), timeout=timeout_s)
    except (RayActorError, GetTimeoutError):
        pass  # A dead controller's children end with it; a stuck one is killed below.
    finally:
        ray.kill(controller)


@contextmanager
def _signals_set(stop: threading.Event) -> Iterator[None]:
    def on_signal(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        stop.set()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
