"""One tensor-parallel rank in a process of its own: the group, and a model that is split over it."""

from __future__ import annotations

from pathlib import Path

import torch

from actors.model.tensor_parallel.group import Rendezvous, TensorParallelGroup, join_group
from actors.model.tensor_parallel.rank_calls import RankTrust
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Trust, TrustMaterial
from tests.actors.model.stepping import Sequence, Stepper, make_runner

_HOST = "127.0.0.1"
_TIMEOUT_S = 50.0


class RankPeer:
    """Every method but address() is collective: it has to be called on all ranks at the same time."""

    def __init__(self, device: str, rank: int, size: int, material: TrustMaterial) -> None:
        """device: of torch; on the CPU, this file itself can be tried."""
        self._device, self._rank, self._size = torch.device(device), rank, size
        self._trust = RankTrust(Trust(material), Party("engine-0", 1))
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._rendezvous = Rendezvous(_HOST, self._device, _TIMEOUT_S) if rank == 0 else None
        self._group: TensorParallelGroup | None = None

    def address(self) -> tuple[str, int]:
        assert self._rendezvous is not None, "rank 0 has it"
        return self._rendezvous.address

    def join(self, address: tuple[str, int]) -> None:
        self._group = join_group(
            self._rendezvous or address,
            self._rank,
            self._size,
            device=self._device,
            host=_HOST,
            timeout_s=_TIMEOUT_S,
            trust=self._trust,
        )

    def exchange(self, num_numbers: int) -> tuple[list[float], list[list[float]]]:
        """Return the first and last numbers of a sum over the ranks, and of what all ranks have."""
        assert self._group is not None
        own = torch.arange(num_numbers, device=self._device).float() + self._rank
        gathered, total = self._group.all_gather(own), self._group.all_reduce(own)
        return total[[0, -1]].tolist(), gathered[:, [0, -1]].tolist()

    def generate(self, directory: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Return greedy tokens, in float32."""
        runner = make_runner(directory, group=self._group, attention_backend="auto", device=self._device.type)
        runner.warm_up()
        stepper = Stepper(runner)
        for index, prompt in enumerate(prompts):
            stepper.add(str(index), Sequence(prompt))
        outputs = stepper.run(num_output_tokens=num_tokens, chunk=17)
        return [outputs[str(index)] for index in range(len(prompts))]
