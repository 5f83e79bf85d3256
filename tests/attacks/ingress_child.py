"""The process of an ingress under attack. It loads what an ingress of a cluster loads, and no more."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection

from actors.process.garbage_collection import no_collection
from cluster.text.torch_free import without_torch
from tests.attacks.ingress_settings import IngressSettings


def serve(pipe: Connection, settings: IngressSettings) -> None:
    """Serve until the pipe is closed. It is told the ports, then a CallbackReport for each message."""
    with no_collection(), without_torch():
        from tests.attacks.served_ingress import serve_until_closed

    asyncio.run(serve_until_closed(pipe, settings))
