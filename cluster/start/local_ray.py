"""Connecting to a Ray cluster, or starting one on this machine that ends with us. Never calls `ray stop`.

Ray reads RAY_AUTH_MODE once, when it is imported: nothing in this file imports it before the mode is chosen.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import grpc

from cluster.config import ClusterConfig
from cluster.errors import CannotStart
from cluster.start.ray_directory import RayDirectory

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 * 2**20
_ANSWER_TIMEOUT_S: Final = 20.0
_IS_ALIVE: Final = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_directories: Final[list[RayDirectory]] = []
"""The directory of the local cluster, while there is one. It is one for the process, as Ray's cluster is."""


def connect(config: ClusterConfig) -> ClusterConfig:
    """Join the Ray cluster of the configuration or of RAY_ADDRESS; without either start a local one.

    Returns the configuration as it is for that cluster: in a local one, engines listen on loopback only. Raises
    CannotStart if that cluster does not answer, or does not take us.
    Every process of a local cluster, Ray's own included, listens on loopback only (docs/security.md has the list), and
    its files are in a directory that only this user can enter. It takes a token of its own: Ray 2.60's default would
    write one into the user's home directory, which changes how every later cluster of that user starts.
    """
    address = address_of(config)
    if address is not None:
        _join(address, config.ray.namespace)
        return config
    _start_local(config)
    return config if config.engine_host else config.model_copy(update={"engine_host": "127.0.0.1"})


def address_of(config: ClusterConfig) -> str | None:
    """Return the address of the Ray cluster that is to be joined; None if one has to be started."""
    return config.ray.address or os.environ.get("RAY_ADDRESS") or None


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Let no SIGTERM reach this thread, nor any process that is started meanwhile, for all of its life.

    A service manager, a shell or `timeout` sends SIGTERM to a whole process group, systemd to every process of the
    service. Ray's processes would end at once, and what is being served with them; this way the driver alone hears of
    it, drains the cluster and then ends Ray. Ray does the same for SIGINT. A signal that came meanwhile is delivered
    afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def disconnect(*, has_failed: bool = False) -> None:
    """Leave the cluster; a local one ends. has_failed: its logs are kept, and a log line says where."""
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
    """Return whether it asks for a token; it says so to who comes without one. Raises CannotStart.

    RAY: its own attempts to reach a head that is not there take more than ten minutes.
    """
    if ":" not in address or "://" in address or os.environ.get("RAY_USE_TLS", "0") != "0":
        return False  # Ray finds that head itself, or it only answers to who has Ray's certificates.
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_IS_ALIVE)
        try:
            ask(b"", timeout=_ANSWER_TIMEOUT_S, wait_for_ready=True)
        except grpc.RpcError as error:
            match error.code():
                case grpc.StatusCode.UNIMPLEMENTED:
                    raise CannotStart(f"what listens at {address} is not the head of a Ray cluster (its GCS)") from None
                case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED:
                    silence = f"no head of a Ray cluster has answered at {address} for {_ANSWER_TIMEOUT_S:g} s"
                    raise CannotStart(f"{silence}: the port of its GCS is wanted, 6379 by default") from None
                case code:
                    return code is grpc.StatusCode.UNAUTHENTICATED
    return False


def _start_local(config: ClusterConfig) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By Ray's default workers yield to everything else on the machine (nice 15): beside other work an engine may be
    # silent for long enough to be taken for lost.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray takes 127.0.0.1 for "the address that others see", and then has half of its servers listen on every address,
    # unless it is told that there will be no other node. The name tells where Ray does so by itself.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    directory = RayDirectory()
    _directories.append(directory)
    try:
        _init(config, directory)
    except BaseException:
        disconnect(has_failed=True)
        raise


def _init(config: ClusterConfig, directory: RayDirectory) -> None:
    import ray

    with sigterm_blocked():
        ray.init(
            namespace=config.ray.namespace,
            num_cpus=max(config.num_cpus, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(directory.path),
        )
