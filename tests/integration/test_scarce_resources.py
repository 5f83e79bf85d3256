"""`raypd serve` where the host gives it little: few descriptors, a small temporary directory, little shared memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from cluster.client import GenerateClient
from tests.integration.serve.cluster import config
from tests.integration.served import ServeProcess
from tests.patience import TEST_S
from tests.reference import greedy_tokens, random_prompt

pytestmark = [pytest.mark.more, pytest.mark.ray, pytest.mark.timeout(TEST_S)]

_NUM_TOKENS = 8
_needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")


def _with_small(directory: str, size: str) -> list[str]:
    """Run what follows where a file system of this size is mounted at the directory, which nobody else sees."""
    return ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs {directory} && exec "$@"', "sh"]


@pytest.fixture
def temporary_directory() -> Iterator[Path]:
    """A directory whose path leaves room for the names of Ray's Unix sockets."""
    directory = Path(tempfile.mkdtemp(prefix="few-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


async def _serves(
    directory: Path, tmp_path: Path, run_by: list[str], environment: Mapping[str, str] | None = None
) -> None:
    prompt = random_prompt(40)
    process = ServeProcess(
        config(directory) | {"ingress": {"count": 1}}, tmp_path, environment=environment, run_by=run_by
    )
    try:
        async with GenerateClient(process.wait_until_ready()) as client:
            answer = client.generate(prompt, max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
            token_ids = [token_id async for response in answer for token_id in response.token_ids]
        assert token_ids == greedy_tokens(directory, tuple(prompt), _NUM_TOKENS)
        assert process.stop() == 0, "\n".join(process.lines)
    finally:
        process.kill_if_alive()


async def test_256_descriptors_for_each_process_are_enough(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    await _serves(checkpoint("llama"), tmp_path, run_by=["prlimit", "--nofile=256:256"])


async def test_twelve_gib_of_address_space_are_enough(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    await _serves(checkpoint("llama"), tmp_path, run_by=["prlimit", f"--as={12 << 30}"])


@_needs_root
async def test_a_full_temporary_directory_costs_logs_and_nothing_else(
    checkpoint: Callable[[str], Path], tmp_path: Path, temporary_directory: Path
) -> None:
    await _serves(
        checkpoint("llama"),
        tmp_path,
        run_by=_with_small(str(temporary_directory), "300k"),
        environment={"TMPDIR": str(temporary_directory)},
    )


@_needs_root
async def test_four_mib_of_shared_memory_are_enough(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    await _serves(checkpoint("llama"), tmp_path, run_by=_with_small("/dev/shm", "4m"))
