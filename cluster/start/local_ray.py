"""Connecting to a Ray cluster, or starting one on this machine that ends with this process.

Ray reads RAY_AUTH_MODE once, when it is imported, so functions in this file import Ray only after the mode is set.
`ray stop` is never called, since it would end other Ray clusters on the machine as well.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

import grpc

from cluster.config import ClusterConfig
from cluster.errors import CannotStart
from cluster.start.needed_processes import only_needed_processes
from cluster.start.ray_directory import RayDirectory
from cluster.start.working_directory import look_for_hiding_packages

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 * 2**20
_ANSWER_TIMEOUT_S: Final = 20.0
_IS_ALIVE: Final = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_directories: Final[list[RayDirectory]] = []
"""The directory of the local Ray cluster, while there is one. A process can be connected to one Ray cluster only."""


def connect(config: ClusterConfig) -> ClusterConfig:
    """Join the Ray cluster at ray.address or RAY_ADDRESS; without either, start one on this machine.

    Returns the settings for that cluster: in a local one, engines listen on 127.0.0.1 unless engine_host is set. Raises
    CannotStart if the Ray cluster does not answer, refuses the connection, or cannot be started, and in a directory
    whose packages Ray's processes would load in place of ours.

    All processes of a local cluster, including Ray's, listen on loopback only (docs/security.md has the list), and its
    files are in a directory that only this user can enter. The cluster gets its own random token. Ray 2.60 by default
    would write a token into the user's home directory, which changes how every later cluster of that user starts.
    """
    look_for_hiding_packages(Path.cwd())
    address = address_of(config)
    if address is not None:
        _join(address, config.ray.namespace)
        return config
    _start_local(config)
    return config if config.engine_host else config.model_copy(update={"engine_host": "127.0.0.1"})


def import_ray(config: ClusterConfig) -> None:
    """Import Ray and the controller's class before connect() does, such as while something else is waited for.

    Sets the environment variables that connect() would set.
    """
    if address_of(config) is None:
        _set_environment()
    import ray  # noqa: F401

    import cluster.pool.controller.controller  # noqa: F401


def address_of(config: ClusterConfig) -> str | None:
    """Return the address of the Ray cluster to join; None if one has to be started."""
    return config.ray.address or os.environ.get("RAY_ADDRESS") or None


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM in this thread within the context, and for good in all processes that are started within.

    A shell or `timeout` sends SIGTERM to a whole process group, and systemd to every process of a service. Ray's
    processes would end at once, and running requests would fail. With the signal blocked there, the driver alone gets
    it, drains the cluster and then ends Ray. Ray blocks SIGINT in the same way. A signal that arrives within the
    context is delivered at its end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def disconnect(*, has_failed: bool = False) -> None:
    """Disconnect from the Ray cluster; a local one ends.

    has_failed: keep the logs of a local cluster, and log their directory
    """
    import ray

    ray.shutdown()
    while _directories:
        directory = _directories.pop()
        if has_failed:
            logger.warning("the logs of the local Ray cluster are kept", extra={"directory": str(directory.logs)})
            directory.keep()
        else:
            directory.remove()


def _join(address: str, namespace: str) -> None:
    asks_for_token = _wait_for_head(address)
    import ray

    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError) as error:
        reason = f"the Ray cluster at {address} cannot be joined: {' '.join(str(error).split())}"
        advice = "; it asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to its own"
        raise CannotStart(reason + advice * asks_for_token) from error


def _wait_for_head(address: str) -> bool:
    """Wait until Ray's head answers at an address. Returns whether the head demands a token. Raises CannotStart.

    Ray itself would try for more than ten minutes to reach a head that does not exist.
    """
    if ":" not in address or "://" in address or os.environ.get("RAY_USE_TLS", "0") != "0":
        return False  # Only Ray can find this head, or the head demands Ray's certificates.
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_IS_ALIVE)
        try:
            ask(b"", timeout=_ANSWER_TIMEOUT_S, wait_for_ready=True)
        except grpc.RpcError as error:
            match error.code():
                case grpc.StatusCode.UNIMPLEMENTED:
                    raise CannotStart(f"the server at {address} is not the head of a Ray cluster (its GCS)") from None
                case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED:
                    silence = f"no head of a Ray cluster has answered at {address} for {_ANSWER_TIMEOUT_S:g} s"
                    raise CannotStart(f"{silence}: give the port of its GCS, 6379 by default") from None
                case code:
                    return code is grpc.StatusCode.UNAUTHENTICATED
    return False


def _set_environment() -> None:
    """Set the variables that Ray reads in a local cluster's processes, unless the user has set them."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default Ray gives workers a low priority (nice 15). On a busy host, an engine could then be silent for so long
    # that the controller considers it lost.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # The first workers start with the node, not once the driver has connected: they import Ray while ray.init() waits.
    os.environ.setdefault("RAY_enable_worker_prestart", "1")
    # With 127.0.0.1 as the node's address, half of Ray's servers would listen on all addresses, unless Ray is told with
    # this variable that no other node will join. Its name comes from the systems on which this is Ray's default.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _start_local(config: ClusterConfig) -> None:
    _set_environment()
    directory = RayDirectory()
    _directories.append(directory)
    try:
        _init(config, directory)
    except Exception as error:  # Ray raises Exception itself if a process of its own is not up within 30 s.
        disconnect(has_failed=True)
        reason = " ".join(str(error).split())
        raise CannotStart(f"Ray cannot be started on this machine (is it overloaded?): {reason}") from error
    except BaseException:
        disconnect(has_failed=True)
        raise


def _init(config: ClusterConfig, directory: RayDirectory) -> None:
    import ray

    processes = nullcontext() if config.ray.all_processes else only_needed_processes()
    with sigterm_blocked(), processes:
        ray.init(
            namespace=config.ray.namespace,
            num_cpus=max(config.num_cpus, len(os.sched_getaffinity(0))),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(directory.path),
        )
