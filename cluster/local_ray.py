"""Connecting to a Ray cluster, or starting one on this machine that ends with us. Never calls `ray stop`.

Ray reads RAY_AUTH_MODE once, when it is imported: nothing in this file imports it before the mode is chosen.
"""

from __future__ import annotations

import logging
import os
import secrets

from cluster.config import ClusterConfig

_OBJECT_STORE_BYTES = 80 * 2**20


def connect(config: ClusterConfig) -> ClusterConfig:
    """Join the Ray cluster of the configuration or of RAY_ADDRESS; without either start a local one.

    Returns the configuration as it is for that cluster: in a local one, engines listen on loopback only.
    A local cluster listens on loopback only and takes a token of its own: Ray 2.60's default would write one into the
    user's home directory, which changes how every later cluster of that user starts.
    """
    address = address_of(config)
    if address is not None:
        import ray

        ray.init(address=address, namespace=config.ray.namespace, log_to_driver=False, logging_level=logging.WARNING)
        return config
    _start_local(config)
    return config if config.engine_host else config.model_copy(update={"engine_host": "127.0.0.1"})


def address_of(config: ClusterConfig) -> str | None:
    """Of the Ray cluster that is to be joined; None if one has to be started."""
    return config.ray.address or os.environ.get("RAY_ADDRESS") or None


def disconnect() -> None:
    """Leave the cluster; a local one ends."""
    import ray

    ray.shutdown()


def _start_local(config: ClusterConfig) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By Ray's default workers yield to everything else on the machine (nice 15): beside other work an engine may be
    # silent for long enough to be taken for lost.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    import ray

    ray.init(
        namespace=config.ray.namespace,
        num_cpus=max(config.num_cpus, os.cpu_count() or 1),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.WARNING,
        _node_ip_address="127.0.0.1",
    )
