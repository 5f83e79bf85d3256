"""The cluster's secret as the controller has it: drawn or in a file, the same for every process, and replaced in steps.

Pure. A drawn secret is in memory alone: the controller's, and that of every engine and ingress, which get it by calls.
A controller that starts anew asks them for it, and draws another one only if nobody has it.

A secret is replaced in two steps, so that at every moment any two processes have one in common: first all accept the
new one beside the old one; once all do, the old one is dropped. Who stays silent holds up the second step, not the
first. A controller that starts anew in between finds several secrets and goes on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from cluster.errors import SecretIsInFile
from kv_transfer.trust.membership import TrustMaterial
from kv_transfer.trust.secret import MAX_ACCEPTED


class ClusterTrust:
    """What every process is to accept. Lives on the controller's event loop."""

    def __init__(self, secret_file: Path | None, draw: Callable[[], TrustMaterial] = TrustMaterial.draw) -> None:
        """secret_file: where each node has the secret; None: it is drawn."""
        self._secret_file = secret_file
        self._draw = draw
        self._material: TrustMaterial | None = None
        self._is_there = asyncio.Event()

    def begin(self) -> None:
        """Draw a secret, or use the file, for a cluster that starts."""
        self.restore((), 0)

    def restore(self, found: Iterable[TrustMaterial | None], last_generation: int) -> None:
        """Go on with the newest of what living processes have, or draw a secret if they have none.

        last_generation: the newest that an earlier controller is known to have given out
        """
        materials = [material for material in found if material is not None]
        if self._secret_file is not None:
            self._set(TrustMaterial(1, secret_file=str(self._secret_file)))
        elif materials:
            self._set(max(materials, key=lambda material: material.generation))
        else:
            drawn = self._draw()
            self._set(TrustMaterial(max(drawn.generation, last_generation + 1), drawn.secrets))

    @property
    def generation(self) -> int:
        """The generation of what every process is to have; 0 before begin() or restore()."""
        return 0 if self._material is None else self._material.generation

    @property
    def is_rotating(self) -> bool:
        """Whether an older secret is still accepted."""
        return self._material is not None and len(self._material.secrets) > 1

    async def material(self) -> TrustMaterial:
        """What every process is to have; waits for begin() or restore()."""
        await self._is_there.wait()
        assert self._material is not None, "it is set before the event"
        return self._material

    def rotate(self) -> None:
        """Accept a new secret beside those that are accepted. Raises SecretIsInFile."""
        if self._secret_file is not None:
            raise SecretIsInFile(str(self._secret_file))
        assert self._material is not None, "operators are answered after the start"
        drawn = self._draw()
        # Asked for again and again before any is dropped, the oldest ones have to go: the number is bounded.
        kept = self._material.secrets[: MAX_ACCEPTED - 1]
        self._set(TrustMaterial(max(drawn.generation, self.generation + 1), (*drawn.secrets, *kept)))

    def settle(self, generations: Iterable[int]) -> bool:
        """Drop the older secrets if all have the newest. generations: of every process. Returns whether it did."""
        if not self.is_rotating or any(generation < self.generation for generation in generations):
            return False
        assert self._material is not None, "it rotates"
        self._set(TrustMaterial(self.generation + 1, self._material.secrets[:1]))
        return True

    def _set(self, material: TrustMaterial) -> None:
        self._material = material
        self._is_there.set()
