"""The calls by which the controller gives the cluster's secrets to engines and ingresses, and asks for them again.

Secrets are never among the arguments with which an actor is created: Ray keeps these in its own store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from actors.process.ray_calls import RayCallFailed, call
from cluster.config import ClusterConfig
from cluster.pool.cluster_trust import ClusterTrust
from cluster.settings.internal_tls import InternalTlsConfig
from kv_transfer.trust.authority import draw_tls_material
from kv_transfer.trust.membership import TrustMaterial
from kv_transfer.trust.tls import TlsFiles, TlsMaterial

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S: Final = 5.0
_REASK_DELAY_S: Final = 1.0


async def give_trust(actor: Any, trust: ClusterTrust) -> int:
    """Give an engine or an ingress the newest secrets. Returns the generation that it has; 0 if it did not answer."""
    try:
        generation: int = await call(actor.use_trust, await trust.material(), timeout_s=_CALL_TIMEOUT_S)
    except RayCallFailed as failed:
        logger.warning("a process did not receive the cluster's secrets", extra={"error": str(failed)})
        return 0
    return generation


async def spread_trust(actors: Iterable[Any], trust: ClusterTrust) -> bool:
    """Give all processes the newest secrets, and drop the older ones if all have them. Returns whether none is left."""
    everybody = list(actors)
    if trust.settle(await asyncio.gather(*(give_trust(actor, trust) for actor in everybody))):
        # A process that misses this call accepts the older secrets until its next heartbeat.
        await asyncio.gather(*(give_trust(actor, trust) for actor in everybody))
    return not trust.is_rotating


async def find_trust(actors: Callable[[], Sequence[Any]], timeout_s: float) -> list[TrustMaterial]:
    """Return the secrets that running engines and ingresses have; empty if none has any.

    If no process answers and one of them is only silent, they are asked again for timeout_s seconds: with a newly drawn
    secret, they and processes that start later would refuse each other.
    """
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + timeout_s
    while True:
        answers = await asyncio.gather(*(_reveal(actor) for actor in actors()))
        found = [answer for answer in answers if isinstance(answer, TrustMaterial)]
        is_one_silent = any(isinstance(answer, RayCallFailed) and answer.is_silence for answer in answers)
        if found or not is_one_silent or loop.time() >= give_up_s:
            return found
        await asyncio.sleep(_REASK_DELAY_S)


async def _reveal(actor: Any) -> TrustMaterial | RayCallFailed | None:
    try:
        material: TrustMaterial | None = await call(actor.reveal_trust, timeout_s=_CALL_TIMEOUT_S)
    except RayCallFailed as failed:
        return failed
    return material


def make_tls(config: ClusterConfig) -> TlsMaterial | TlsFiles | None:
    """Return the certificates that internal_tls asks for; None if it is off."""
    match config.internal_tls:
        case InternalTlsConfig() as files:
            return TlsFiles(str(files.ca), str(files.certificate), str(files.key))
        case True:
            return draw_tls_material()
        case _:
            return None
