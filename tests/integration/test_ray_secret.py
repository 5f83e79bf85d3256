"""The cluster's secret in a cluster as `raypd serve` starts it: where it is not, who gets it, how it is replaced.

Each test begins with what the one before it has left.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import pytest

from cluster.client import GenerateClient
from tests.integration.cluster_load import engines_become, load
from tests.integration.served import ROOT, ServeProcess, actor_process, ask_processes
from tests.patience import CLUSTER_S, TEST_S

pytestmark = [pytest.mark.ray, pytest.mark.more, pytest.mark.timeout(TEST_S)]

_RAY: Final = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    # As raypd sets it for its own cluster: otherwise Ray looks for loopback's cluster at the host's other address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
_ASK_ACTORS: Final = """
import json, ray
from ray.experimental import internal_kv
ray.init(address={address!r}, namespace="raypd", log_to_driver=False, _node_ip_address="127.0.0.1")
names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["name"].startswith("raypd-")]
actors = [ray.get_actor(name) for name in names if "engine/" in name or "ingress/" in name]
given = ray.get([actor.reveal_trust.remote() for actor in actors], timeout=60)
[key] = internal_kv._internal_kv_list(b"controller/", namespace=b"raypd")
saved = internal_kv._internal_kv_get(key, namespace=b"raypd")
kept = {{(m.block_hash_key.hex(), m.tls.key.decode()) for m in given}}
given = [[m.generation, [s.hex() for s in m.secrets]] for m in given]
print(json.dumps({{"given": given, "kept": list(kept), "saved": saved.hex()}}))
"""

Given = list[tuple[int, list[bytes]]]
"""Each engine's and ingress's generation and secrets."""


@pytest.fixture(scope="module")
def serve(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    config: dict[str, object] = {
        "model": {"model": str(checkpoint("llama")), "dtype": "float32"},
        "cache": {"num_blocks": 256},
        "scheduler": {"max_num_batched_tokens": 48, "max_num_seqs": 32},
        "parallel": {"num_threads": 1},
        "prefill": {"count": 1, "num_cpus": 0.1},
        "decode": {"count": 1, "num_cpus": 0.1},
        "drain_timeout_s": 30,
        "internal_tls": True,
    }
    process = ServeProcess(config, tmp_path_factory.mktemp("secret"), environment=_RAY)
    try:
        yield process
        assert process.stop() == 0, "\n".join(process.lines)
    finally:
        process.kill_if_alive()


@pytest.fixture(scope="module")
def address(serve: ServeProcess) -> str:
    return serve.wait_until_ready()


def process_called(name: str) -> psutil.Process:
    [process] = [process for process, found in ask_processes(psutil.Process.name) if found.startswith(name)]
    return process


def argument_of(process: psutil.Process, name: str) -> str:
    [value] = [found.group(1) for part in process.cmdline() if (found := re.match(rf"-*{name}=(\S+)", part))]
    return value


@dataclass(frozen=True)
class Asked:
    """The secrets that every engine and ingress has been given, and what the controller has saved.

    block_hash_key, tls_key: the same in all of them, for as long as the cluster lives
    """

    given: Given
    block_hash_key: bytes
    tls_key: str
    saved: bytes


def ask_actors() -> Asked:
    gcs_address = argument_of(process_called("raylet"), "gcs-address")
    script = _ASK_ACTORS.format(address=gcs_address)
    environment = {**os.environ, **_RAY}
    asked = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=CLUSTER_S,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr[-3000:]
    answer = json.loads(asked.stdout.splitlines()[-1])
    given = [(generation, [bytes.fromhex(secret) for secret in found]) for generation, found in answer["given"]]
    [(block_hash_key, tls_key)] = answer["kept"]
    return Asked(given, bytes.fromhex(block_hash_key), tls_key, bytes.fromhex(answer["saved"]))


def words_of(process: psutil.Process) -> dict[str, bytes]:
    """Its arguments and environment, each under a name."""
    try:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(process.pid) from None
    name = f"{process.name()} {process.pid}"
    return {f"arguments of {name}": "\0".join(process.cmdline()).encode(), f"environment of {name}": environment}


async def decided(client: GenerateClient, decision: str) -> None:
    """Wait until the controller has decided so."""
    async with asyncio.timeout(CLUSTER_S):
        while True:
            if any(decision in one.text for one in (await client.status()).decisions):
                return
            await asyncio.sleep(0.2)


def forms_of(secret: bytes) -> list[bytes]:
    """How it could be written: as it is, in hexadecimal digits, in base64, as Python and as C show bytes."""
    return [
        secret,
        secret.hex().encode(),
        secret.hex().upper().encode(),
        base64.b64encode(secret).rstrip(b"="),
        base64.urlsafe_b64encode(secret).rstrip(b"="),
        repr(secret)[2:-1].encode(),
        "".join(f"\\{byte:03o}" for byte in secret).encode(),
    ]


def memory_of(process: psutil.Process) -> Iterator[bytes]:
    """Yield what a process has written into its memory, region by region."""
    with Path(f"/proc/{process.pid}/mem").open("rb", 0) as memory:
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            first, last, mode = re.match(r"(\w+)-(\w+) (\S+)", line).groups()  # type: ignore[union-attr]  # the kernel's format
            if mode.startswith("rw"):
                memory.seek(int(first, 16))
                try:
                    yield memory.read(int(last, 16) - int(first, 16))
                except OSError:
                    continue  # A region that no page stands behind.


async def test_the_secret_is_in_no_argument_environment_log_status_or_store(serve: ServeProcess, address: str) -> None:
    asked = ask_actors()
    given = asked.given
    assert len(given) == 3, "two engines and an ingress"
    assert len({(generation, tuple(found)) for generation, found in given}) == 1
    [secret] = given[0][1]
    assert len(secret) == len(asked.block_hash_key) == 32
    forms = [form for one in (secret, asked.block_hash_key) for form in forms_of(one)]
    forms += map(str.encode, asked.tls_key.splitlines()[1:-1])

    async with GenerateClient(address) as client:
        status = str(await client.status())
    session = Path(argument_of(process_called("raylet"), "session_dir"))
    logs = [path for path in (session / "logs").rglob("*") if path.is_file()]
    assert len(logs) > 10
    contents = {
        "output": "\n".join(serve.lines).encode(),
        "status": status.encode(),
        "saved state": asked.saved,
        **{str(path): path.read_bytes() for path in logs},
    }
    for _, words in ask_processes(words_of):
        contents |= words
    found = [place for place, content in contents.items() for form in forms if form in content]
    assert not found
    if os.geteuid() == 0:
        # All that Ray keeps about actors, tasks and jobs is in there, and what passes through its object store.
        for server in ("gcs_server", "raylet"):
            written = list(memory_of(process_called(server)))
            assert any(b"raypd-engine/" in region for region in written), "this is where it would be"
            assert not any(form in region for region in written for form in forms), server


async def test_a_new_controller_asks_for_the_secret_and_gives_it_to_a_new_engine(
    address: str, checkpoint: Callable[[str], Path]
) -> None:
    asked = ask_actors()
    before = asked.given
    async with GenerateClient(address) as client, load(client, checkpoint("llama")):
        actor_process("Controller").kill()
        await decided(client, "go on after the controller's death")
        await client.scale(decode=2)
        await engines_become(
            client, {("prefill-0", 1, "prefill"), ("decode-0", 1, "decode"), ("decode-1", 1, "decode")}
        )
    asked_again = ask_actors()
    after = asked_again.given
    assert (asked_again.block_hash_key, asked_again.tls_key) == (asked.block_hash_key, asked.tls_key)
    assert len(after) == 4
    assert {generation for generation, _ in after} == {before[0][0]}
    assert all(found == before[0][1] for _, found in after)


async def test_a_secret_is_replaced_under_load_and_a_new_engine_gets_the_new_one(
    address: str, checkpoint: Callable[[str], Path]
) -> None:
    before = ask_actors().given
    async with GenerateClient(address) as client, load(client, checkpoint("llama")):
        if not await client.rotate_secret(timeout_s=60):
            await decided(client, "older secrets are refused")
        engines = {("prefill-0", 1, "prefill"), ("decode-0", 1, "decode")}
        await client.drain("decode-1", for_good=True)
        await engines_become(client, engines)
        await client.scale(decode=2)
        await engines_become(client, {*engines, ("decode-1", 2, "decode")})
    after = ask_actors().given
    assert len({(generation, tuple(found)) for generation, found in after}) == 1
    [new] = after[0][1]
    assert new != before[0][1][0]
