"""A rank's adapters: loaded on a thread beside the steps, kept in host memory, put into slots when a step needs them.

The engine's AdapterCache decides what is loaded and dropped; every rank does the same, in the same order. Nothing here
decides by time, so ranks cannot come to differ.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from actors.checkpoint.adapter_files import read_adapter
from actors.checkpoint.peft_config import AdapterRefused
from actors.core.requests.adapter import Adapter, AdapterCommands
from actors.lora_config import LoraConfig
from actors.model.loader import LoadedModel
from actors.model.lora.adapter_weights import ModuleWeights, load_weights
from actors.model.lora.lora_layers import LoraContext, LoraLayer
from actors.model.lora.lora_step import NO_SLOT, LoraStep, SharedPart, plan_step
from actors.model.lora.slot_table import SlotTable
from actors.model.lora.targets import find_targets
from actors.process.cpu_binding import run_on_any_core

logger = logging.getLogger(__name__)

_Weights = Mapping[str, ModuleWeights]


class AdapterStore:
    """Belongs to the thread that computes steps."""

    def __init__(self, config: LoraConfig, model: LoadedModel, num_slots: int, on_ready: Callable[[], None]) -> None:
        """Attach slots to every layer that adapters may change, and allocate the memory of all slots.

        on_ready: called on another thread when take_results() has something to return
        """
        self._config = config
        self._dtype, self._device = model.dtype, model.device
        self._on_ready = on_ready
        self._targets = find_targets(model.forward.model, model.split)
        self._context = LoraContext()
        self._layers = {
            name: LoraLayer(
                target, self._context, num_slots, config.max_lora_rank, dtype=model.dtype, device=model.device
            )
            for name, target in self._targets.items()
        }
        self.configured: list[Adapter] = []
        """The adapters that load_configured() has loaded."""
        self._num_slots = num_slots
        self._slots = SlotTable(num_slots)
        self._adapters: dict[str, _Weights] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters", initializer=run_on_any_core)
        self._results: deque[tuple[str, _Weights | str]] = deque()

    def load_configured(self) -> None:
        """Load what the configuration names. Raises AdapterRefused with the adapter's name."""
        for name, directory in self._config.adapters.items():
            try:
                files = read_adapter(directory, self._config)
                adapter = Adapter(name, directory, files.digest)
                self._adapters[adapter.key] = load_weights(files, self._targets, self._dtype)
            except AdapterRefused as error:
                raise AdapterRefused(f"lora.adapters.{name}: {error}") from error
            self.configured.append(adapter)

    def obey(self, commands: AdapterCommands) -> None:
        """Begin to load the adapters that the commands name for it, and drop others at once."""
        for key in commands.drops:
            self._adapters.pop(key, None)
            self._slots.drop(key)
        for adapter in commands.loads:
            self._thread.submit(self._load, adapter)

    def take_results(self) -> dict[str, str | None]:
        """Return the loads that ended since the last call, by key: None, or the reason of a failure."""
        results: dict[str, str | None] = {}
        while self._results:
            key, loaded = self._results.popleft()
            if isinstance(loaded, str):
                results[key] = loaded
            else:
                self._adapters[key] = loaded
                results[key] = None
        return results

    def take_slots(self, keys: np.ndarray) -> np.ndarray | None:
        """Put the adapters of a step into slots.

        keys: [num_requests] of str, or None for a request without an adapter
        Returns the slot of each request, [num_requests] int64, NO_SLOT where it has none; None if no request has one.
        """
        names: list[str | None] = keys.tolist()
        needed = {name for name in names if name is not None}
        if not needed:
            return None
        slot_of, new = self._slots.take(needed)
        for key in new:
            weights = self._adapters[key]
            for name, layer in self._layers.items():
                layer.put(slot_of[key], weights.get(name))
        return np.array([NO_SLOT if name is None else slot_of[name] for name in names], dtype=np.int64)

    def begin_step(self, slots: np.ndarray | None, query_lens: np.ndarray) -> None:
        """Plan the adapters of the next forward, in place of the plan of the one before.

        slots: of take_slots(); query_lens: [num_requests] int64
        """
        self._context.step = None
        if slots is not None:
            self._context.step = plan_step(np.repeat(slots, query_lens), self._config.max_lora_rank, self._device)

    def use_slots(self, slots: Tensor) -> None:
        """Let the next forward read each token's slot on the device, so that a graph can record it.

        Every token's product is taken with all slots, and masked; an empty slot adds zeros.
        slots: [num_tokens] int32, NO_SLOT for a token without an adapter
        """
        max_rank, num_slots = self._config.max_lora_rank, self._num_slots
        owners = torch.arange(num_slots * max_rank, dtype=torch.int32, device=self._device) // max_rank
        shared = SharedPart(0, len(slots), 0, num_slots - 1, slots[:, None] != owners[None, :], is_recorded=True)
        self._context.step = LoraStep((), shared)

    def use_none(self) -> None:
        """Let the next forward use no adapter."""
        self._context.step = None

    def shutdown(self) -> None:
        """Load no more adapters; waits for the load that is under way."""
        self._thread.shutdown(cancel_futures=True)

    @torch.inference_mode()
    def _load(self, adapter: Adapter) -> None:
        """Load an adapter, on the loading thread."""
        try:
            self._results.append((adapter.key, self._read(adapter)))
        except AdapterRefused as error:
            self._results.append((adapter.key, f"adapter {adapter.name!r}: {error}"))
        except Exception as error:
            logger.exception("an adapter was not loaded", extra={"adapter": adapter.name})
            self._results.append((adapter.key, f"adapter {adapter.name!r}: {type(error).__name__}: {error}"))
        self._on_ready()

    def _read(self, adapter: Adapter) -> _Weights:
        files = read_adapter(adapter.directory, self._config)
        if files.digest != adapter.digest:
            raise AdapterRefused(
                f"the files in {adapter.directory} are not those that the request means: their digest is "
                f"{files.digest} instead of {adapter.digest}; load the adapter again"
            )
        return load_weights(files, self._targets, self._dtype)
