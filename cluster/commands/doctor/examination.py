"""The course of `raypd doctor`: check the model, this node or every node of a Ray cluster, and the memory."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

from rich.console import Console
from rich.markup import escape

from cluster.access.certificate_dates import find_certificate_warnings
from cluster.checks.internal_files import InternalFiles
from cluster.checks.model_check import find_adapter_mistakes, find_model_mistakes
from cluster.checks.startup_checks import find_ingress_file_mistakes, find_memory_mistakes
from cluster.commands.doctor.checkpoint import Checkpoint, check_tokenizer, read_checkpoint
from cluster.commands.doctor.findings import GIB, Finding, Verdict, failure, warning
from cluster.commands.doctor.memory_budget import GPU_MEMORY_GIB, check_budget, describe_kv
from cluster.commands.doctor.node import NodeFacts, judge_node, look_at_node
from cluster.commands.doctor.role_counts import judge_roles
from cluster.config import ClusterConfig
from cluster.errors import InvalidConfig
from cluster.routing.engine_connection import EngineRole
from cluster.start import local_ray

_COLOURS: Final = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "red"}


def examine(config: ClusterConfig, console: Console, *, gpu: str | None, as_json: bool) -> bool:
    """Make all checks and print the findings. Returns whether none is a failure.

    gpu: a kind of GPU (a key of GPU_MEMORY_GIB): check only whether the model fits on it; None checks the machines
    Raises InvalidConfig if the kind is unknown.
    """
    if gpu is not None and gpu not in GPU_MEMORY_GIB:
        raise InvalidConfig("--gpu", [f"{gpu!r} is not a known kind of GPU; choose one of {', '.join(GPU_MEMORY_GIB)}"])
    checkpoint, model_findings = _look_at_model(config)
    findings: list[Finding] = []
    for found in (model_findings, _look_around(config, checkpoint, gpu)):
        for finding in found:
            findings.append(finding)
            if not as_json:
                # Print findings as they come: those about the model are known long before torch has found devices.
                _print(finding, console)
    if as_json:
        rows = [dataclasses.asdict(finding) | {"verdict": finding.verdict.value} for finding in findings]
        console.print_json(json.dumps(rows))
    return all(finding.verdict is not Verdict.FAILURE for finding in findings)


def _look_at_model(config: ClusterConfig) -> tuple[Checkpoint | None, Iterator[Finding]]:
    """Return the checkpoint, or None if no engine could serve it, and the findings about it."""
    directory = Path(config.model.model)
    checkpoint, findings = read_checkpoint(directory)
    mistakes: list[str] = []
    if checkpoint is not None:
        mistakes = find_model_mistakes(
            config.model,
            config.tensor_parallel_sizes,
            config.draft_models,
            stores=config.store_settings,
            block_sizes=config.block_sizes,
        )
        advice = "see docs/models.md for what is served, or change the setting that is named"
        findings += [failure("model", mistake, advice) for mistake in mistakes]
    without = find_adapter_mistakes(config.lora)
    findings += [failure("LoRA adapters", mistake, "leave it out, or see docs/lora.md") for mistake in without]

    def say() -> Iterator[Finding]:
        yield from findings
        if checkpoint is not None:
            yield check_tokenizer(directory, use_fastokens=config.ingress.use_fastokens)

    # A model that no engine can serve gets no memory budget, because the sizes in its config may make no sense.
    return (None if mistakes else checkpoint), say()


def _look_around(config: ClusterConfig, checkpoint: Checkpoint | None, gpu: str | None) -> Iterator[Finding]:
    """Yield the findings about the engines' roles, the machines and their memory. gpu: as in examine()"""
    yield judge_roles(config)
    if checkpoint is not None:
        role = next(role for role in (EngineRole.DECODE, EngineRole.BOTH, *EngineRole) if config.group(role).count)
        yield describe_kv(checkpoint, config.engine_config(role))
    if gpu is not None:
        room = {role: (int(GPU_MEMORY_GIB[gpu] * GIB), True) for role in EngineRole}
        yield from _budgets(config, checkpoint, room)
    elif local_ray.address_of(config) is not None:
        yield from _look_at_cluster(config, checkpoint)
    else:
        facts = look_at_node(config.ingress.host, config.ingress.ports, InternalFiles.of(config))
        yield from judge_node(facts, _num_gpus(config))
        yield from _look_at_ingress_files(config)
        yield from (failure("memory", mistake, "see docs/deploy.md") for mistake in find_memory_mistakes(config))
        yield from _budgets(config, checkpoint, {role: _room_of(config, role, [facts]) for role in EngineRole})


def _look_at_ingress_files(config: ClusterConfig) -> Iterator[Finding]:
    advice = "`raypd serve` would not start with this file: see docs/security.md for what the file has to contain"
    yield from (failure("files", mistake, advice) for mistake in find_ingress_file_mistakes(config.ingress))
    for reason in find_certificate_warnings(config.ingress.tls):
        yield warning("certificate", reason, "renew the certificate; raypd reads the file again when it changes")


def _look_at_cluster(config: ClusterConfig, checkpoint: Checkpoint | None) -> list[Finding]:
    local_ray.connect(config)
    # Ray reads its authentication settings when it is imported, so modules that import it come after connect().
    from cluster.commands.doctor.cluster import (
        clock_offsets,
        judge_clocks,
        judge_ingress_room,
        judge_room,
        judge_versions,
        look_at_nodes,
    )
    from cluster.pool.engines.engine_placement import can_hold
    from cluster.pool.ray_objects.ray_nodes import alive_nodes

    try:
        nodes = asyncio.run(alive_nodes())
        looks = look_at_nodes(nodes, config.ingress.host, config.ingress.ports, InternalFiles.of(config))
        findings = [judge_clocks(clock_offsets(nodes), {node.node_id: node.address for node in nodes})]
        findings += [judge_versions(looks), *judge_room(config, nodes), judge_ingress_room(config, nodes)]
        facts_by_role: dict[EngineRole, list[NodeFacts]] = {role: [] for role in EngineRole}
        for look in looks:
            if look.facts is None:
                advice = "install raypd and its dependencies on every node; see this node's Ray logs"
                findings.append(replace(failure("node", look.error, advice), node=look.node.address))
                continue
            roles = [role for role in EngineRole if config.group(role).count and can_hold(look.node, config, role)]
            for role in roles:
                facts_by_role[role].append(look.facts)
            num_gpus = max((_num_gpus_of(config, role) for role in roles), default=0)
            findings += [replace(found, node=look.node.address) for found in judge_node(look.facts, num_gpus)]
        room = {role: _room_of(config, role, facts) for role, facts in facts_by_role.items() if facts}
        findings += _budgets(config, checkpoint, room)
    finally:
        local_ray.disconnect()
    return findings


_Room: TypeAlias = tuple[int, bool]
"""The free memory of a rank in bytes, and whether it is a GPU's memory."""


def _budgets(config: ClusterConfig, checkpoint: Checkpoint | None, room: dict[EngineRole, _Room]) -> list[Finding]:
    if checkpoint is None:
        return []
    return [
        check_budget(
            role.value,
            checkpoint,
            config.engine_config(role),
            free_bytes,
            is_gpu=is_gpu,
            num_threads=_num_threads(config, role),
        )
        for role, (free_bytes, is_gpu) in room.items()
        if config.group(role).count
    ]


def _num_threads(config: ClusterConfig, role: EngineRole) -> int:
    """Return the threads of a rank: Ray gives torch as many as the rank reserves cores, if no setting names them."""
    return config.engine_config(role).parallel.num_threads or max(1, int(config.group(role).num_cpus))


def _room_of(config: ClusterConfig, role: EngineRole, nodes: list[NodeFacts]) -> _Room:
    """Return the least memory that a rank has on one of these nodes: its GPU's, or an equal part of the host's."""
    gpus = [gpu.free_bytes for facts in nodes for gpu in facts.gpus] if _num_gpus_of(config, role) else []
    if gpus:
        return min(gpus), True
    return min(facts.free_memory_bytes for facts in nodes) // config.num_ranks(role), False


def _num_gpus(config: ClusterConfig) -> int:
    return max(_num_gpus_of(config, role) for role in EngineRole if config.group(role).count)


def _num_gpus_of(config: ClusterConfig, role: EngineRole) -> int:
    """Return the number of GPUs that an engine needs on one node."""
    group = config.group(role)
    if config.model.device == "cpu":
        return 0
    wanted = group.num_gpus or (1.0 if config.model.device == "cuda" else 0.0)
    return -int(-wanted * config.num_ranks(role) // 1)


def _print(finding: Finding, console: Console) -> None:
    colour = _COLOURS[finding.verdict]
    where = f"{finding.node} " if finding.node else ""
    line = f"[{colour}]{finding.verdict.value:8}[/] {escape(where + finding.check)}: {escape(finding.found)}"
    console.print(line, highlight=False, soft_wrap=True)
    if finding.advice:
        console.print(f"         -> {escape(finding.advice)}", highlight=False, soft_wrap=True)
