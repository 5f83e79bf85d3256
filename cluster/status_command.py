"""`raypd status`: the engines of a running cluster, as its controller sees them."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.errors import ClusterError


def show_status(ray_address: str | None, namespace: str, console: Console) -> None:
    """Print a table. Raises ClusterError if there is no Ray cluster, or no raypd cluster in it."""
    import ray

    from cluster.pool.controller import CONTROLLER_NAME, ClusterStatus

    try:
        ray.init(address=ray_address or "auto", namespace=namespace, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise ClusterError(f"no Ray cluster at {ray_address or 'RAY_ADDRESS or on this machine'}: {error}") from error
    try:
        controller: Any = ray.get_actor(CONTROLLER_NAME, namespace=namespace)
        status: ClusterStatus = ray.get(controller.status.remote(), timeout=30.0)
    except ValueError as error:
        raise ClusterError(f"no raypd cluster in the Ray namespace {namespace!r}") from error
    finally:
        ray.shutdown()
    console.print(f"ingress {status.ingress_address}   membership {status.membership_version}")
    console.print(_table(status))


def _table(status: Any) -> Table:  # ClusterStatus, whose module loads ray
    table = Table()
    for column in ("engine", "life", "state", "address", "running", "waiting", "loading", "KV usage", "last error"):
        table.add_column(column)
    for engine in sorted(status.engines, key=lambda engine: engine.engine_id):
        stats = engine.health.stats if engine.health is not None else None
        table.add_row(
            engine.engine_id,
            str(engine.incarnation),
            engine.state.value,
            engine.address or "-",
            str(stats.num_running_reqs) if stats else "-",
            str(stats.num_waiting_reqs) if stats else "-",
            str(stats.num_waiting_for_remote_kvs) if stats else "-",
            f"{stats.kv_cache_usage:.0%}" if stats else "-",
            status.last_errors.get(engine.engine_id, ""),
        )
    return table
