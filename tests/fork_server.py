"""Processes beside the tests' own that need no time to import: a fork server has the libraries loaded."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from typing import Final

_PRELOADED: Final = [
    "actors.engine_server",
    "actors.ranks.rank_loop",
    "kv_transfer.transports.tcp",
    "transformers.models.llama.modeling_llama",
]


def fork_server() -> ForkServerContext:
    """Forked from a process without threads, as spawned ones are; all tests of a worker have the same."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context
