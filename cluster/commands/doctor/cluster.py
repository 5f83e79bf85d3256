"""Checks of all nodes of a Ray cluster: the facts that each node collects, and comparisons between nodes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.process.ray_calls import RayCallFailed, result_of
from cluster.checks.internal_files import InternalFiles
from cluster.commands.doctor.findings import Finding, failure, ok, warning
from cluster.commands.doctor.node import NodeFacts, look_at_node
from cluster.config import ClusterConfig
from cluster.pool.engines.engine_placement import can_hold, engine_bundle, needs_of
from cluster.pool.ray_objects.ray_nodes import Node
from cluster.routing.engine_connection import EngineRole
from cluster.settings.ingress import IngressConfig

_LOOK_TIMEOUT_S: Final = 180.0
_MAX_SKEW_S: Final = 1.0
"""The largest accepted clock offset. Only logs and `raypd status` compare times of several nodes."""


@dataclass(frozen=True, slots=True)
class NodeLook:
    """A node and the facts that it has reported; facts is None if it did not answer, and error holds the reason."""

    node: Node
    facts: NodeFacts | None
    error: str = ""


def look_at_nodes(nodes: list[Node], host: str, ports: tuple[int, ...], files: InternalFiles) -> list[NodeLook]:
    """Collect the facts of all nodes at once; a node without an answer after 180 s has its error instead.

    host, ports, files: as in look_at_node()
    """
    look: Any = ray.remote(look_at_node)
    asked = {}
    for node in nodes:
        where = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        asked[node.node_id] = look.options(num_cpus=0, scheduling_strategy=where).remote(host, ports, files)
    deadline_s = time.monotonic() + _LOOK_TIMEOUT_S
    looks = []
    for node in nodes:
        left_s = max(deadline_s - time.monotonic(), 0.1)
        try:
            looks.append(NodeLook(node, result_of(asked[node.node_id], timeout_s=left_s)))
        except RayCallFailed as failed:
            looks.append(NodeLook(node, None, str(failed).splitlines()[0]))
    return looks


def clock_offsets(nodes: list[Node]) -> dict[str, float]:
    """Return by how many seconds each node's clock is ahead of ours, by node id; nodes without an answer are left out.

    The offset is the node's time less the midpoint between question and answer.
    """
    ask: Any = ray.remote(_now_s)
    offsets = {}
    for node in nodes:
        where = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        for _ in range(2):  # The first task may have to start a worker process, so only the second measurement counts.
            before_s = time.time()
            reference = ask.options(num_cpus=0, scheduling_strategy=where).remote()
            try:
                theirs_s = float(result_of(reference, timeout_s=_LOOK_TIMEOUT_S))
            except RayCallFailed:
                break
            offsets[node.node_id] = theirs_s - (before_s + time.time()) / 2
    return offsets


def judge_clocks(offsets: Mapping[str, float], names: Mapping[str, str]) -> Finding:
    """Judge the offsets of clock_offsets(). names: the names to show for nodes, by node id"""
    late = {names[node_id]: offset_s for node_id, offset_s in offsets.items() if abs(offset_s) > _MAX_SKEW_S}
    if late:
        found = ", ".join(f"{name} {offset_s:+.1f} s" for name, offset_s in sorted(late.items()))
        return warning("clocks", found, "run chrony or another NTP client on every node")
    largest_s = max(map(abs, offsets.values()), default=0.0)
    return ok("clocks", f"{len(offsets)} nodes within {largest_s:.2f} s")


def judge_versions(looks: list[NodeLook]) -> Finding:
    """Check that all nodes have the same versions of Python and Ray, since actors may run on any of them."""
    versions: dict[tuple[str, str], list[str]] = {}
    for look in looks:
        if look.facts is not None:
            versions.setdefault((look.facts.python, look.facts.ray), []).append(look.node.address)
    texts = [f"Python {python} and Ray {ray_} on {', '.join(where)}" for (python, ray_), where in versions.items()]
    if len(versions) > 1:
        return failure("versions", "; ".join(texts), "the same versions on every node: use one image")
    return ok("versions", "the same on every node")


def judge_room(config: ClusterConfig, nodes: list[Node]) -> list[Finding]:
    """Check whether all engines would fit into the Ray cluster if it were empty.

    Engines are placed role after role, so nodes that several roles could use go to the first of these roles.
    """
    left = {node.node_id: dict(node.resources) for node in nodes}
    findings = []
    for role in EngineRole:
        count = config.group(role).count
        if not count:
            continue
        placed = sum(_place(config, role, nodes, left) for _ in range(count))
        check, needs = f"room for {role.value} engines", needs_of(config, role)
        if placed == count:
            findings.append(ok(check, f"{count} of {needs}"))
            continue
        found = f"for {placed} of {count}: each needs {needs}"
        if placed == 0:
            findings.append(failure(check, found, "add such nodes, or ask for less (num_cpus, num_gpus, labels)"))
        else:
            findings.append(warning(check, found, "the others wait until there is room, as `raypd status` shows"))
    return findings


def judge_ingress_room(config: ClusterConfig, nodes: list[Node]) -> Finding:
    """Check whether an empty cluster has nodes for all ingresses, by custom resources and labels."""
    ingress, check = config.ingress, "room for ingresses"
    fitting = [node for node in nodes if node.has(ingress.resources, ingress.labels)]
    needs = f"each needs {ingress.resources} on a node that is labelled {ingress.labels}"
    advice = "add such nodes, or change ingress.resources and ingress.labels"
    if ingress.per_node:
        if fitting:
            return ok(check, f"one on each of {len(fitting)} nodes")
        return failure(check, f"no node is labelled {ingress.labels} and has {ingress.resources}", advice)
    num_placed = min(sum(_num_ingresses(ingress, node) for node in fitting), ingress.count)
    found = f"{num_placed} of {ingress.count}"
    if num_placed == ingress.count:
        return ok(check, found)
    if num_placed == 0:
        return failure(check, f"{found}: {needs}", advice)
    return warning(check, f"{found}: {needs}", "the others wait until there is room, as `raypd status` shows")


def _num_ingresses(ingress: IngressConfig, node: Node) -> int:
    """Return how many ingresses fit on a node that has room for one; all do if they need no resources."""
    needs = [(name, amount) for name, amount in ingress.resources.items() if amount > 0]
    return min((int(node.resources[name] // amount) for name, amount in needs), default=ingress.count)


def _place(config: ClusterConfig, role: EngineRole, nodes: list[Node], left: dict[str, dict[str, float]]) -> bool:
    bundle = engine_bundle(config, role)
    for node in nodes:
        free = left[node.node_id]
        if can_hold(replace(node, resources=free), config, role):
            for name, amount in bundle.items():
                free[name] -= amount
            return True
    return False


def _now_s() -> float:
    return time.time()  # Ray cannot make a task of a builtin function such as time.time.
