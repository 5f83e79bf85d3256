"""A whole engine in a process of its own: model, scheduler, engine thread and connector, without Ray."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

from actors.config import EngineConfig
from actors.core.outputs.engine_core_outputs import EngineCoreOutputs
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.engine_builder import build_engine_core
from actors.engine_thread import EngineThread
from kv_transfer.params import EngineAddress, KVTransferParams
from kv_transfer.trust.membership import Trust, TrustMaterial
from tests.gpu.control_server import ControlServer

_TIMEOUT_S = 50.0


@dataclass(slots=True)
class Tokens:
    """The tokens that one engine gave for one request, from position first_position on."""

    first_position: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_over: bool = False
    error: str | None = None


class EnginePeer:
    def __init__(self, device: str, engine_id: str, config: EngineConfig, material: TrustMaterial) -> None:
        """device: as EngineConfig knows no index, the process sees only this one, or computes on the CPU."""
        del device
        self._server = ControlServer(engine_id, material)
        self._address = EngineAddress(engine_id, 1, self._server.address)
        self._changed = threading.Condition()
        self._tokens: dict[str, Tokens] = defaultdict(Tokens)
        self._death: BaseException | None = None
        wake = threading.Event()
        self._core = build_engine_core(config, self._address, self._server.control, wake.set, trust=Trust(material))
        self._thread = EngineThread(self._core, self._deliver, self._on_death, wake)
        self._thread.start()

    def address(self) -> EngineAddress:
        return self._address

    def submit(self, request_id: str, prompt: list[int], num_tokens: int, ticket: KVTransferParams | None) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
        self._core.submit(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling_params=params,
                arrival_time_s=time.monotonic(),
                kv_transfer_params=ticket,
            )
        )
        self._thread.wake()

    def wait(self, request_id: str) -> Tokens:
        """Everything that this engine has to say about the request."""
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self._tokens[request_id].is_over or self._death is not None, _TIMEOUT_S
            )
            assert self._death is None, self._death
            assert is_there, f"only this came: {self._tokens[request_id]}"
            return self._tokens[request_id]

    def num_blocks_in_use(self) -> int:
        stats = self._thread.stats
        return stats.num_blocks - stats.num_free_blocks

    def _deliver(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        with self._changed:
            for batch in outputs.values():
                for output in batch.outputs:
                    tokens = self._tokens[output.request_id]
                    if not tokens.token_ids:
                        tokens.first_position = output.first_position
                    tokens.token_ids += output.new_token_ids
                    tokens.logprobs += [entry.logprobs[0] for entry in output.logprobs or ()]
                    tokens.is_over |= output.finished
                    tokens.error = tokens.error or output.error
            self._changed.notify_all()

    def _on_death(self, error: BaseException) -> None:
        with self._changed:
            self._death = error
            self._changed.notify_all()
