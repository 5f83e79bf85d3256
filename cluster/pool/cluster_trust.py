"""The cluster's secret in the controller: drawn or read from a file, the same for every process, replaced in two steps.

This file is pure. A drawn secret exists only in the memory of the controller, the engines and the ingresses, which get
it by calls. A controller that is started again asks them for the secret, and draws another one only if none has it.

A secret is replaced in two steps, so that any two processes have one in common at every moment: first every process
accepts the new secret beside the old one; once all do, the old one is dropped. A process that does not answer delays
the second step, not the first. A controller that is restarted in between finds both and completes the replacement.
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
    """The secrets that every process should accept. Only the controller's event loop uses this object."""

    def __init__(
        self,
        secret_file: Path | None,
        draw: Callable[[], TrustMaterial] = TrustMaterial.draw,
        *,
        block_hash_key_file: Path | None = None,
        make_tls: Callable[[], TlsMaterial | TlsFiles | None] = lambda: None,
    ) -> None:
        """Set where the secrets come from; begin() or restore() makes them.

        secret_file: the file with the secret on each node; None: the secret is drawn
        block_hash_key_file: the file with the key of block hashes on each node; None: the key is drawn
        make_tls: returns the certificates that every process shows, or their files on each node, or None without TLS
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
        """Take over the newest secrets of running processes, or draw a secret if they have none.

        found: the secrets of running processes
        last_generation: the newest generation that an earlier controller is known to have given out
        """
        materials = [material for material in found if material is not None]
        if materials:
            material = max(materials, key=lambda material: material.generation)
        else:
            material = self._make_material(last_generation)
        if self._secret_file is not None:
            # With a secret file, the generation is always 1: the file has the same secrets for every controller.
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
        """The generation of the secrets that every process should have; 0 before begin() or restore()."""
        return 0 if self._material is None else self._material.generation

    @property
    def is_rotating(self) -> bool:
        """Whether an older secret is still accepted."""
        return self._material is not None and len(self._material.secrets) > 1

    async def material(self) -> TrustMaterial:
        """Return the secrets that every process should have; wait for begin() or restore() first."""
        await self._is_there.wait()
        assert self._material is not None, "it is set before the event"
        return self._material

    def rotate(self) -> None:
        """Draw a new secret and accept it beside those that are accepted already. Raises SecretIsInFile."""
        if self._secret_file is not None:
            raise SecretIsInFile(str(self._secret_file))
        assert self._material is not None, "operators are answered after the start"
        drawn = self._draw()
        # The number of accepted secrets is bounded: with repeated rotations the oldest ones are dropped early.
        kept = self._material.secrets[: MAX_ACCEPTED - 1]
        generation = max(drawn.generation, self.generation + 1)
        self._set(replace(self._material, generation=generation, secrets=(*drawn.secrets, *kept)))

    def settle(self, generations: Iterable[int]) -> bool:
        """Drop the older secrets if every process has the newest. Returns whether they were dropped.

        generations: the generation that each process has
        """
        if not self.is_rotating or any(generation < self.generation for generation in generations):
            return False
        assert self._material is not None, "it rotates"
        self._set(replace(self._material, generation=self.generation + 1, secrets=self._material.secrets[:1]))
        return True

    def _set(self, material: TrustMaterial) -> None:
        self._material = material
        self._is_there.set()
