"""Engines of one host hand over by shared memory, with nothing configured; without memory files, by TCP."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from cluster.parameters.generation import GenerateRequest, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from kv_transfer.config import KVTransferConfig
from tests.engine_pair import engine_config
from tests.integration.local_cluster import local_cluster
from tests.reference import greedy_tokens, random_prompt

NUM_TOKENS = 6


def forbid_memory_files(name: str, flags: int) -> int:
    raise PermissionError("not in this sandbox")


@pytest.mark.parametrize(("is_allowed", "path"), [(True, "shared memory"), (False, "tcp")])
async def test_engines_of_one_host_take_the_best_path_there_is(
    is_allowed: bool,
    path: str,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not is_allowed:
        monkeypatch.setattr(os, "memfd_create", forbid_memory_files)
    caplog.set_level(logging.INFO, "kv_transfer")
    directory, prompt = checkpoint("llama"), random_prompt(40)
    sampling = SamplingOptions(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    request = GenerateRequest(request_id="r", prompt=TokenPrompt(prompt), sampling=sampling)
    async with (
        local_cluster(engine_config(directory, transfer=KVTransferConfig())) as cluster,
        aclosing(cluster.serving.generate(request)) as chunks,
    ):
        token_ids = [token_id async for chunk in chunks for token_id in chunk.token_ids]
    assert token_ids == greedy_tokens(directory, tuple(prompt), NUM_TOKENS)
    taken = [vars(record)["path"] for record in caplog.records if record.msg == "a KV link is up"]
    assert taken == [path, path], "the producer's end and the consumer's"
