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
from dataclasses import replace
from pathlib import Path

from cluster.errors import SecretIsInFile
from kv_transfer.trust.membership import TrustMaterial
from kv_transfer.trust.secret import MAX_ACCEPTED
from kv_transfer.trust.tls import TlsFiles, TlsMaterial


class ClusterTrust:
    """The secrets that every process is to accept. It belongs to the controller's event loop."""

    def __init__(
        self,
        secret_file: Path | None,
        draw: Callable[[], TrustMaterial] = TrustMaterial.draw,
        *,
        block_hash_key_file: Path | None = None,
        make_tls: Callable[[], TlsMaterial | TlsFiles | None] = lambda: None,
    ) -> None:
        """secret_file: where each node has the secret; None: it is drawn

        block_hash_key_file: where each node has the key of block hashes; None: it is drawn
        make_tls: makes the certificates that every process shows, or says where each node has them
        """
        self._secret_file = secret_file
        self._draw = draw
        self._block_hash_key_file = "" if block_hash_key_file is None else str(block_hash_key_file)
        self._make_tls = make_tls
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
        if materials:
            material = max(materials, key=lambda material: material.generation)
        else:
            material = self._make_material(last_generation)
        if self._secret_file is not None:
            # What processes have taken of an earlier controller has this generation, too: it says the same.
            material = replace(material, generation=1, secrets=(), secret_file=str(self._secret_file))
        self._set(material)

    def _make_material(self, last_generation: int) -> TrustMaterial:
        drawn = self._draw()
        return replace(
            drawn,
            generation=max(drawn.generation, last_generation + 1),
            block_hash_key=b"" if self._block_hash_key_file else drawn.block_hash_key,
            block_hash_key_file=self._block_hash_key_file,
            tls=self._make_tls(),
        )

    @property
    def generation(self) -> int:
        """The generation of what every process is to have; 0 before begin() or restore()."""
        return 0 if self._material is None else self._material.generation

    @property
    def is_rotating(self) -> bool:
        """Whether an older secret is still accepted."""
        return self._material is not None and len(self._material.secrets) > 1

    async def material(self) -> TrustMaterial:
        """Return the secrets that every process is to have; waits for begin() or restore()."""
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
        generation = max(drawn.generation, self.generation + 1)
        self._set(replace(self._material, generation=generation, secrets=(*drawn.secrets, *kept)))

    def settle(self, generations: Iterable[int]) -> bool:
        """Drop the older secrets if all have the newest. generations: of every process. Returns whether it did."""
        if not self.is_rotating or any(generation < self.generation for generation in generations):
            return False
        assert self._material is not None, "it rotates"
        self._set(replace(self._material, generation=self.generation + 1, secrets=self._material.secrets[:1]))
        return True

    def _set(self, material: TrustMaterial) -> None:
        self._material = material
        self._is_there.set()
