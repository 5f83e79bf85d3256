"""Checks of ports, files and memory that an ingress and the engines need, before any model is loaded.

Without these checks, a taken port, a missing certificate, a broken token file or too little memory would show only
minutes later, when the engines have loaded. The checks read files and bind sockets for a moment; they change nothing.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import logging
import math
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from actors.model.cache.host_memory import free_host_memory_bytes
from cluster.access.certificate_dates import find_certificate_warnings
from cluster.access.server_tls import ServerTls, TlsConfig
from cluster.access.tokens import read_token_file
from cluster.checks.internal_files import InternalFiles
from cluster.config import ClusterConfig
from cluster.errors import AddressUnavailable, InvalidConfig
from cluster.routing.engine_connection import EngineRole
from cluster.settings.ingress import IngressConfig

logger = logging.getLogger(__name__)

_GIB: Final = 1 << 30
_EXPORTER: Final = "opentelemetry.exporter.otlp.proto.http"
_LOOK_AGAIN_S: Final = 0.2


def refuse_bad_start(config: ClusterConfig) -> None:
    """Check this machine for a cluster that runs on it alone. Raises InvalidConfig with every mistake."""
    num_ingresses = 1 if config.ingress.per_node else config.ingress.count
    mistakes = [
        *find_ingress_mistakes(config.ingress, num_ingresses),
        *InternalFiles.of(config).find_mistakes(),
        *find_memory_mistakes(config),
    ]
    if mistakes:
        raise InvalidConfig("this machine", mistakes)


def refuse_bad_files(config: ClusterConfig) -> None:
    """Check the files that every node of a Ray cluster needs, on this node. Raises InvalidConfig with all mistakes."""
    if mistakes := InternalFiles.of(config).find_mistakes():
        raise InvalidConfig("this node", mistakes)


async def refuse_bad_node(ingress: IngressConfig, port_timeout_s: float = 5.0) -> None:
    """Check the node on which an ingress starts, and log warnings about certificates' dates.

    port_timeout_s: seconds to wait for the ports, which an earlier ingress may hold for a moment longer
    Raises InvalidConfig with every mistake.
    """
    give_up_s = time.monotonic() + port_timeout_s
    while mistakes := await asyncio.to_thread(find_ingress_mistakes, ingress):
        if time.monotonic() >= give_up_s:
            raise InvalidConfig(f"node {socket.gethostname()}", mistakes)
        await asyncio.sleep(_LOOK_AGAIN_S)
    for warning in await asyncio.to_thread(find_certificate_warnings, ingress.tls):
        logger.warning("a certificate expires soon, or is not valid now", extra={"reason": warning})


def find_ingress_mistakes(ingress: IngressConfig, num_ingresses: int = 1) -> list[str]:
    """Return why ingresses with these settings could not start on this machine; empty if they could.

    num_ingresses: the number of ingresses on this machine; each takes the next ports
    """
    taken = [str(AddressUnavailable(address, reason)) for address, reason in _taken(ingress, num_ingresses)]
    return [*taken, *find_ingress_file_mistakes(ingress)]


def find_ingress_file_mistakes(ingress: IngressConfig) -> list[str]:
    """Return why an ingress could not use its files and directories on this machine; empty if it could."""
    mistakes = [] if ingress.tls is None else _tls_mistakes(ingress.tls)
    if ingress.tokens is not None:
        mistakes += _token_mistakes(ingress.tokens)
    if ingress.request_trace is not None and (reason := why_not_write(ingress.request_trace.directory)) is not None:
        mistakes.append(f"ingress.request_trace.directory: {reason}")
    if ingress.tracing is not None and not _has_otel():
        mistakes.append(f"ingress.tracing needs {_EXPORTER}: pip install 'raypd[otel]', or leave tracing out")
    return mistakes


def _has_otel() -> bool:
    """Whether OpenTelemetry's exporter can be imported."""
    try:
        return importlib.util.find_spec(_EXPORTER) is not None
    except ModuleNotFoundError:
        return False


def why_not_write(directory: Path) -> str | None:
    """Return why this process cannot make files in a directory that it may have to make; None if it can."""
    there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not there.is_dir():
        return f"{there} is not a directory"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to by this user"


def find_memory_mistakes(config: ClusterConfig, free_bytes: int | None = None) -> list[str]:
    """Return why the KV caches of engines without GPUs do not fit into this machine together; empty if they fit.

    free_bytes: the free memory; default: this machine's, within the container's limit
    Each rank of each engine counts with cache.kv_cache_memory_gib. Weights need memory on top and are not counted.
    """
    parts, needed_gib = [], 0.0
    for role in EngineRole:
        group, engine = config.group(role), config.engine_config(role)
        each_gib = engine.cache.kv_cache_memory_gib
        if each_gib is None or engine.cache.num_blocks is not None or group.num_gpus or not group.count:
            continue
        num_caches = group.count * config.num_ranks(role)
        parts.append(f"{num_caches} x {each_gib:g} GiB for {role.value} engines")
        needed_gib += num_caches * each_gib
    free_gib = (free_host_memory_bytes() if free_bytes is None else free_bytes) / _GIB
    if needed_gib <= free_gib:
        return []
    return [
        (
            f"cache.kv_cache_memory_gib: the KV caches need {needed_gib:g} GiB ({', '.join(parts)}), and "
            f"{math.floor(free_gib * 10) / 10:g} GiB are free: lower it, or start fewer engines"
        )
    ]


def why_not_listen(host: str, port: int) -> str | None:
    """Return why a process cannot listen at this address on this machine; None if it can. Port 0 is always free."""
    if not port:
        return None
    host = host.strip("[]")
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return None
    except OSError as error:
        return "another process listens there already" if error.errno == errno.EADDRINUSE else str(error.strerror)


def _taken(ingress: IngressConfig, num_ingresses: int) -> Iterable[tuple[str, str]]:
    """Yield each address at which ingresses could not listen, with the reason."""
    for port in ingress.ports:
        for number in range(num_ingresses if port else 0):
            if (reason := why_not_listen(ingress.host, port + number)) is not None:
                yield f"{ingress.host}:{port + number}", reason


def _tls_mistakes(tls: TlsConfig) -> list[str]:
    files = {"certificate": tls.certificate, "key": tls.key, "client_ca": tls.client_ca}
    mistakes = [
        f"ingress.tls.{name}: {path} cannot be read: {reason}"
        for name, path in files.items()
        if path is not None and (reason := _why_not_read(path))
    ]
    if mistakes:
        return mistakes
    try:
        ServerTls(tls)
    except InvalidConfig as error:
        return [f"ingress.tls: {mistake}" for mistake in error.mistakes]
    return []


def _token_mistakes(path: Path) -> list[str]:
    try:
        read_token_file(path)
    except InvalidConfig as error:
        return [f"ingress.tokens: {path}: {mistake}" for mistake in error.mistakes]
    return []


def _why_not_read(path: Path) -> str:
    try:
        with path.open("rb"):
            return ""
    except OSError as error:
        return str(error.strerror)
