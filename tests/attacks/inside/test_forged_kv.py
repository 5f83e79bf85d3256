"""An engine takes KV from nobody who does not know the cluster's secret, whoever names that peer to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from actors.engine_server import EngineServer
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.session import EngineSession
from kv_transfer.config import KVTransferConfig
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from kv_transfer.trust.membership import Trust, TrustMaterial
from tests.actors.test_hostile_requests import REQUEST, answer, check_integrity, tokens
from tests.engine_pair import engine_config
from tests.trusted import TRUST, member


async def test_a_peer_without_the_secret_gives_an_engine_no_kv(checkpoint: Callable[[str], Path]) -> None:
    """The forger answers as a producer would, with all of raypd's protocol and a secret of its own."""
    config = engine_config(checkpoint("llama"), transfer=KVTransferConfig(transport="tcp"))
    engine = EngineServer(config, "decode-0", 1, TRUST)
    forger = EngineServer(config, "prefill-9", 1, Trust(TrustMaterial.draw()))
    address, forgers_address = await engine.start("127.0.0.1"), await forger.start("127.0.0.1")
    session = EngineSession(EngineDescriptor("decode-0", 1, EngineRole.BOTH, address), member(), timeout_s=60.0)
    await session.open()
    try:
        peer = EngineAddress("prefill-9", 1, forgers_address)
        ticket = KVTransferParams("forged", 0, TransferRole.CONSUMER, peer)
        told = await answer(session, replace(REQUEST, request_id="told", kv_transfer_params=ticket))
        again = await answer(session, replace(REQUEST, request_id="again"))

        assert told[-1].timings is not None
        assert told[-1].timings.num_prompt_tokens_computed == len(REQUEST.prompt_token_ids), "nothing came from there"
        assert tokens(told) == tokens(again)
        assert engine.refusals.total == 1
        await check_integrity(engine)
    finally:
        await session.close()
        await engine.stop()
        await forger.stop()
