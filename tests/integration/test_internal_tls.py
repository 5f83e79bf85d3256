"""Engines and an ingress with internal_tls: the same answers, and nobody from outside gets as far as the secret."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.errors import EngineLost
from cluster.parameters.generation import GenerateRequest, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.session import EngineSession
from kv_transfer.config import KVTransferConfig
from kv_transfer.trust.authority import draw_tls_material
from kv_transfer.trust.membership import Trust, TrustMaterial
from tests.engine_pair import engine_config
from tests.integration.local_cluster import local_cluster
from tests.integration.test_shared_memory import forbid_memory_files
from tests.reference import greedy_tokens, random_prompt
from tests.trusted import member

NUM_TOKENS = 6


async def test_a_handoff_over_tls_gives_the_tokens_that_generate_gives_and_strangers_no_session(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Engines of one host would share memory.
    monkeypatch.setattr(os, "memfd_create", forbid_memory_files)
    caplog.set_level(logging.INFO, "kv_transfer")
    directory, prompt = checkpoint("llama"), random_prompt(40)
    sampling = SamplingOptions(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    request = GenerateRequest(request_id="r", prompt=TokenPrompt(prompt), sampling=sampling)
    material = replace(TrustMaterial.draw(), tls=draw_tls_material())
    async with local_cluster(engine_config(directory, transfer=KVTransferConfig()), trust=Trust(material)) as cluster:
        async with aclosing(cluster.serving.generate(request)) as chunks:
            token_ids = [token_id async for chunk in chunks for token_id in chunk.token_ids]

        [engine] = [one.descriptor for one in cluster.pool.snapshot() if one.descriptor.role is EngineRole.DECODE]
        with_other_certificate = Trust(replace(material, tls=draw_tls_material()))
        assert "it has to be on there too, under the same authority" in await _refusal(engine, with_other_certificate)
        # Even with the secret.
        assert "no answer from" in await _refusal(engine, Trust(replace(material, tls=None)))
    assert token_ids == greedy_tokens(directory, tuple(prompt), NUM_TOKENS)
    taken = [vars(record)["path"] for record in caplog.records if record.msg == "a KV link is up"]
    assert taken == ["tcp, TLS"] * 2, "the producer's end and the consumer's"


async def _refusal(engine: EngineDescriptor, trust: Trust) -> str:
    session = EngineSession(engine, member("stranger", trust=trust), timeout_s=1.0)
    with pytest.raises(EngineLost) as lost:
        await session.open()
    return str(lost.value)
