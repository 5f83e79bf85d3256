"""The LoRA adapters that an ingress knows, by the names that requests use.

Adapters that the controller has registered come with the membership; their weights stay what they were at that time.
Other adapters are found when a request first names them, in the directory of their name below an allowed one; if their
files change, later requests get the new weights. In both cases a request carries the digest of its weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from actors.checkpoint.adapter_files import describe_adapter, files_signature
from actors.checkpoint.peft_config import AdapterRefused
from actors.core.requests.adapter import Adapter
from actors.lora_config import LoraConfig, is_adapter_name
from cluster.access.caller import Caller
from cluster.errors import AdapterNotFound, FieldViolation, InvalidRequest

logger = logging.getLogger(__name__)

_MAX_FOUND: Final = 1024


@dataclass(frozen=True, slots=True)
class _Found:
    adapter: Adapter
    signature: tuple[int, ...]


class AdapterDirectory:
    """The adapters of an ingress. It belongs to one event loop; files are read in threads."""

    def __init__(self, config: LoraConfig | None = None) -> None:
        """Begin with no adapters. config: None where no adapters are served"""
        self._config = config
        self._registered: dict[str, Adapter] = {}
        self._found: OrderedDict[str, _Found] = OrderedDict()
        self._looking: dict[str, asyncio.Task[_Found | None]] = {}
        """For each name the task that reads the adapter's files; all requests that name the adapter wait for it."""

    def register(self, adapters: Iterable[Adapter]) -> None:
        """Replace the registered adapters."""
        self._registered = {adapter.name: adapter for adapter in adapters}

    def known(self) -> list[Adapter]:
        """Return the adapters that are registered or were found, sorted by name."""
        found = {name: found.adapter for name, found in self._found.items()}
        return sorted((found | self._registered).values(), key=lambda adapter: adapter.name)

    def known_to(self, caller: Caller) -> list[Adapter]:
        """Return those of known() that the caller may use; a caller must not learn that others exist."""
        return [adapter for adapter in self.known() if caller.may_use(adapter.name)]

    def knows(self, name: str, caller: Caller) -> bool:
        """Whether an adapter is one of known_to()."""
        return caller.may_use(name) and (name in self._registered or name in self._found)

    async def find(self, name: str, caller: Caller, field: str = "lora_name") -> Adapter:
        """Return the adapter of a name. Raises AdapterNotFound; InvalidRequest if the adapter cannot be served.

        field: the request's field that names it
        """
        # This check comes before the lookup on disk, so that its duration does not reveal which adapters exist.
        if not caller.may_use(name):
            raise self._not_found(name, caller, field)
        if (registered := self._registered.get(name)) is not None:
            return registered
        config = self._config
        if config is None or not is_adapter_name(name):
            raise self._not_found(name, caller, field)
        try:
            found = await self._look_for(name, config)
        except AdapterRefused as refused:
            self._found.pop(name, None)
            violation = FieldViolation(field, repr(name), f"an adapter that can be served: {refused}")
            raise InvalidRequest(violation) from refused
        if found is None:
            self._found.pop(name, None)
            raise self._not_found(name, caller, field)
        self._found[name] = found
        self._found.move_to_end(name)
        if len(self._found) > _MAX_FOUND:
            self._found.popitem(last=False)
        return found.adapter

    async def _look_for(self, name: str, config: LoraConfig) -> _Found | None:
        """Read an adapter's files on a thread; returns None if there are none. Raises AdapterRefused."""
        if (looking := self._looking.get(name)) is None:
            look = asyncio.to_thread(_look_for, name, config, self._found.get(name))
            looking = self._looking[name] = asyncio.create_task(look)
            looking.add_done_callback(lambda look: self._end_look(name, look))
        try:
            # A cancelled request must not cancel the task, because other requests may wait for it.
            return await asyncio.shield(looking)
        finally:
            # The task keeps its error, whose traceback refers to this frame: that would be a cycle.
            del looking

    def _end_look(self, name: str, look: asyncio.Task[_Found | None]) -> None:
        del self._looking[name]
        if not look.cancelled():
            # Reading the exception keeps asyncio from logging it if all requests that waited were cancelled.
            look.exception()

    def _not_found(self, name: str, caller: Caller, field: str) -> AdapterNotFound:
        known = [adapter.name for adapter in self.known_to(caller)]
        return AdapterNotFound(field, name, known, is_enabled=bool(self._config))


def _look_for(name: str, config: LoraConfig, before: _Found | None) -> _Found | None:
    """Read an adapter's files; returns None if there is no such directory, and `before` if its files are unchanged."""
    for allowed in config.allowed_directories:
        directory = Path(allowed, name)
        if not directory.is_dir():
            continue
        signature = files_signature(str(directory))
        if before is not None and before.signature == signature and before.adapter.directory == str(directory):
            return before
        adapter = describe_adapter(name, str(directory), config)
        logger.info("found an adapter", extra={"adapter": name, "directory": str(directory), "digest": adapter.digest})
        return _Found(adapter, signature)
    return None
