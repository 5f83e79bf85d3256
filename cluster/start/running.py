"""The driver of a cluster: starting it, showing the progress of the start, and stopping it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rich.console import Console
from rich.status import Status

from cluster.access.certificate_dates import find_certificate_warnings
from cluster.api.http.live_page.page_access import page_lines
from cluster.checks.startup_checks import refuse_bad_files, refuse_bad_start
from cluster.config import ClusterConfig
from cluster.errors import CannotStart, InvalidConfig
from cluster.start import local_ray
from cluster.start.counted_progress import progress_bar_of

logger = logging.getLogger(__name__)

_POLL_TIMEOUT_S: Final = 30.0
_PROGRESS_INTERVAL_S: Final = 0.25
_ATTEND_INTERVAL_S: Final = 2.0
_LONGEST_STOP_S: Final = 60.0
"""The longest time that the controller takes to stop the cluster, in addition to the drain."""


def serve_until_signalled(config: ClusterConfig, console: Console) -> None:
    """Start the cluster, print its addresses, and drain it on SIGINT or SIGTERM. Raises CannotStart."""
    stop = threading.Event()
    with running_cluster(config, console, stop) as cluster:
        if cluster is None:
            return
        _say_ready(config, console, cluster)
        stop.wait()
        console.print("another process has stopped the cluster" if cluster.is_over else "draining")
    console.print("stopped")


def start_detached(config: ClusterConfig, console: Console) -> None:
    """Start the cluster in a running Ray cluster, print its addresses, and leave it running.

    Raises InvalidConfig, also if no Ray cluster is given, and CannotStart; nothing is left running then.
    """
    if local_ray.address_of(config) is None:
        mistake = "a running Ray cluster is needed: give --ray-address, or set RAY_ADDRESS"
        raise InvalidConfig("--detach", [mistake])
    refuse_bad_files(config)
    config = local_ray.connect(config)
    with _disconnect_at_the_end():
        cluster = RunningCluster(config, needs_driver=False)
        try:
            cluster.start(console, threading.Event())
        except BaseException:
            cluster.stop()
            raise
        _say_ready(config, console, cluster)


def stop_cluster(config: ClusterConfig, console: Console) -> None:
    """Drain and stop the raypd cluster in a Ray cluster and namespace, whoever started it.

    Raises InvalidConfig if no Ray cluster is given, CannotStart if the Ray cluster does not answer.
    """
    if local_ray.address_of(config) is None:
        raise InvalidConfig("stop", ["no Ray cluster is given: give --ray-address, or set RAY_ADDRESS"])
    config = local_ray.connect(config)
    with _disconnect_at_the_end():
        cluster = RunningCluster.find(config)
        num_left = cluster.stop() if cluster is not None else _sweep(config)
        is_there = cluster is not None or num_left
        console.print("stopped" if is_there else f"no raypd cluster runs in namespace {config.ray.namespace!r}")


@contextmanager
def running_cluster(
    config: ClusterConfig, console: Console, stop: threading.Event | None = None
) -> Iterator[RunningCluster | None]:
    """Start a cluster at entry of the context, and stop it at exit. Gives None if `stop` was set during the start.

    stop: if given, SIGINT and SIGTERM set this event instead of interrupting the process
    Raises InvalidConfig if this machine lacks what a local cluster needs, or if files of the cluster's secrets and
    certificates cannot be used; CannotStart if the start fails.
    The cluster needs its driver, this process: if the driver dies, the controller stops the cluster within seconds.
    """
    if local_ray.address_of(config) is None:
        refuse_bad_start(config)
        for warning in find_certificate_warnings(config.ingress.tls):
            console.print(f"[yellow]warning[/] {warning}", soft_wrap=True)
    else:
        refuse_bad_files(config)
    with ExitStack() as at_the_end:
        # Ray installs a SIGTERM handler. Ours is installed after it, and gets signals that were sent meanwhile.
        with local_ray.sigterm_blocked():
            config = local_ray.connect(config)
            _say(console, "Ray is up")
            at_the_end.enter_context(_disconnect_at_the_end())
            if stop is not None:
                at_the_end.enter_context(_signals_set(stop))
        stop = stop or threading.Event()
        cluster = RunningCluster(config, needs_driver=True)
        is_leaving = threading.Event()
        attending = threading.Thread(target=cluster.attend, args=(stop, is_leaving), daemon=True)
        try:
            is_up = cluster.start(console, stop)
            attending.start()
            yield cluster if is_up else None
        finally:
            is_leaving.set()
            if attending.ident is not None:
                attending.join(_POLL_TIMEOUT_S)
            cluster.stop()


class RunningCluster:
    """A cluster, by the handle of its controller. The handle stays valid when Ray starts the controller again."""

    def __init__(self, config: ClusterConfig, *, needs_driver: bool, controller: Any = None) -> None:
        """Create a controller, or use the handle of an existing one.

        needs_driver: whether the controller stops the cluster when this process is gone
        controller:   the handle; None creates a controller, and raises CannotStart if the namespace has one already
        """
        self._config = config
        self.addresses: list[str] = []
        self.http_addresses: list[str] = []
        self.is_over = False
        """Whether the cluster has ended without a call of stop(), as when another process has stopped it."""
        self._controller = controller if controller is not None else _make_controller(config, needs_driver=needs_driver)

    @classmethod
    def find(cls, config: ClusterConfig) -> RunningCluster | None:
        """Return the cluster that runs in the connected Ray cluster and namespace; None if there is none."""
        import ray

        from cluster.pool.ray_objects.object_names import CONTROLLER_NAME

        try:
            return cls(config, needs_driver=False, controller=ray.get_actor(CONTROLLER_NAME))
        except ValueError:
            return None

    @property
    def address(self) -> str:
        """The gRPC address of the first ingress."""
        return self.addresses[0]

    def start(self, console: Console, stop: threading.Event) -> bool:
        """Start the engines and ingresses, and print the progress. Returns False if `stop` was set meanwhile.

        Raises CannotStart. Ray may have no node for the controller yet, or still be installing its environment there:
        the wait for the controller lasts up to start_timeout_s.
        """
        import ray

        from actors.process.ray_calls import FailureKind, RayCallFailed, call_blocking, result_of

        starting = self._controller.start.remote()
        num_events, heard_at_s, was_silent = 0, time.monotonic(), False
        with console.status("starting") as status:
            while not stop.is_set():
                # This wait ends with the start. A wait for the next event would go on after it.
                done, _ = ray.wait([starting], timeout=_PROGRESS_INTERVAL_S)
                try:
                    events = call_blocking(self._controller.progress, num_events, timeout_s=_POLL_TIMEOUT_S)
                    heard_at_s = time.monotonic()
                    self._controller.attend.remote()
                    num_events += len(events)
                    for event in events:
                        _show(console, status, event)
                    if done:
                        self.addresses = result_of(starting, timeout_s=_POLL_TIMEOUT_S)
                        self.http_addresses = call_blocking(self._controller.http_addresses, timeout_s=_POLL_TIMEOUT_S)
                        return True
                except RayCallFailed as failed:
                    if failed.kind is FailureKind.RAISED:
                        raise CannotStart(str(failed)) from failed
                    if failed.kind is not FailureKind.TIMED_OUT:
                        raise CannotStart(f"the controller cannot be called ({failed.kind}): {failed}") from failed
                    if time.monotonic() - heard_at_s > self._config.start_timeout_s:
                        raise CannotStart(self._silence()) from failed
                    if not was_silent:
                        _say(console, "waiting for a node for the controller, and its environment")
                    was_silent = True
        return False

    def _silence(self) -> str:
        controller = self._config.controller
        needs = f"it needs {controller.resources} on a node that is labelled {controller.labels}"
        return f"the controller has not answered for {self._config.start_timeout_s:g} s: {needs}"

    def attend(self, stop: threading.Event, is_leaving: threading.Event) -> None:
        """Tell the controller every two seconds that its driver is there, until is_leaving is set.

        Sets `stop` if the cluster has ended, as when another process has stopped it.
        """
        from actors.process.ray_calls import FailureKind, RayCallFailed, call_blocking

        while not (self.is_over or is_leaving.wait(_ATTEND_INTERVAL_S)):
            try:
                self.is_over = not call_blocking(self._controller.attend, timeout_s=_POLL_TIMEOUT_S)
            except RayCallFailed as failed:
                self.is_over = failed.kind is FailureKind.DIED
                if not self.is_over:
                    logger.warning("the controller does not answer", extra={"error": str(failed)})
        if self.is_over:
            stop.set()

    def stop(self) -> int:
        """Drain and stop the cluster. Kills the actors that do not end by themselves, and returns their number."""
        import ray

        from actors.process.ray_calls import FailureKind, RayCallFailed, call_blocking

        # If the controller dies meanwhile, Ray starts it again and repeats the call; _sweep() ends what remains.
        stop = self._controller.stop.options(max_task_retries=-1)
        try:
            call_blocking(stop, timeout_s=self._config.drain_timeout_s + _LONGEST_STOP_S)
        except RayCallFailed as failed:
            if failed.kind is not FailureKind.DIED:
                # The error is part of the message, since terminals show no fields of log records.
                message = "the controller did not stop the cluster, which is ended without it: %s"
                logger.warning(message, failed, extra={"kind": failed.kind.value})
        finally:
            ray.kill(self._controller)
        return _sweep(self._config)


def _make_controller(config: ClusterConfig, *, needs_driver: bool) -> Any:  # Any: Ray's actor handle
    import ray

    from cluster.pool.controller.controller import Controller
    from cluster.pool.ray_objects.object_names import CONTROLLER_NAME

    actor: Any = ray.remote(Controller)
    try:
        return actor.options(
            name=CONTROLLER_NAME,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            resources=dict(config.controller.resources) or None,
            label_selector=dict(config.controller.labels) or None,
            max_concurrency=1000,
        ).remote(config, needs_driver=needs_driver)
    except ValueError as error:
        namespace = config.ray.namespace
        raise CannotStart(
            f"a raypd cluster runs in namespace {namespace!r} of this Ray cluster already: stop it with `raypd stop`, "
            "or choose another ray.namespace"
        ) from error


def _sweep(config: ClusterConfig) -> int:
    from cluster.pool.ray_objects.leftovers import sweep

    return sweep(config.ray.namespace)


def _show(console: Console, status: Status, event: str) -> None:
    """Print an event of the start; a terminal shows one that counts as a bar in the last line instead."""
    bar = progress_bar_of(event) if console.is_terminal else None
    status.update("starting" if bar is None else bar)
    if bar is None:
        _say(console, event)


def _say(console: Console, event: str) -> None:
    """Print an event of the start with the seconds since this process has started."""
    # The second field of the line, the program's name, may have spaces; the start is field 22, in ticks since the boot.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    elapsed_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    console.print(f"  {elapsed_s:5.1f} s  {event}", highlight=False, soft_wrap=True)


def _say_ready(config: ClusterConfig, console: Console, cluster: RunningCluster) -> None:
    scheme = "http" if config.ingress.tls is None else "https"
    http = "".join(f", {scheme}://{address}/v1" for address in cluster.http_addresses)
    console.print(
        f"[bold green]ready[/] model {config.model_name!r} at {', '.join(cluster.addresses)} (gRPC, raypd.v1){http}  "
        f"prefill {config.prefill.count}, decode {config.decode.count}, both {config.both.count}"
        + (f", encode {config.encode.count}" if config.encode.count else ""),
        soft_wrap=True,
    )
    for line in page_lines(config.ingress, cluster.http_addresses):
        console.print(line, highlight=False, soft_wrap=True)


@contextmanager
def _disconnect_at_the_end() -> Iterator[None]:
    try:
        yield
    except BaseException:
        local_ray.disconnect(has_failed=True)
        raise
    local_ray.disconnect()


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
