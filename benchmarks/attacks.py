"""Measure what attacks on an ingress take from its other clients: `python -m benchmarks.attacks`.

The attacks of tests/attacks, one after the other on one ingress with both APIs and an engine that costs nothing, each
three times; beside them a client that streams (a token every 20 ms) and calls. For each attack: the longest gap of the
client's streams and its longest call (the ingress, the attacker and the client share the machine); the CPU time of the
worst callback of the ingress's event loop; by how much that loop was late at most, waiting for a core included; and how
the ingress's memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

from tests.attacks import connection_attacks, grpc_attacks, http_attacks
from tests.attacks.target import Attack, AttackedIngress, attacked_ingress


def main() -> None:
    """Attack and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", default=[], help="attacks whose names have one of these words in them")
    parser.add_argument("--slow", action="store_true", help="the largest ones as well")
    options = parser.parse_args()
    print(f"load averages of this machine, {os.cpu_count()} cores: {os.getloadavg()}\n")
    print(
        "| attack | longest gap of a stream | longest call | event loop late | worst callback, CPU time | memory, MiB |"
    )
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory, attacked_ingress(Path(directory)) as ingress:
        for attack in (
            Attack("none", _rest),
            *grpc_attacks.ATTACKS,
            *connection_attacks.ATTACKS,
            *http_attacks.ATTACKS,
        ):
            is_wanted = not options.only or any(word in attack.name for word in options.only)
            if is_wanted and (options.slow or not attack.is_slow):
                _measure(ingress, attack)


async def _rest(target: object) -> None:
    """How it is without an attack."""
    await asyncio.sleep(1.0)


def _measure(ingress: AttackedIngress, attack: Attack) -> None:
    try:
        effects = asyncio.run(ingress.suffer(attack))
    except AssertionError as error:
        print(f"| {attack.name} **went through: {error}** | | | | | {ingress.rss_mib():.0f} |", flush=True)
        return
    felt = effects.felt
    gap_ms, call_ms = (
        max(times_s.values(), default=0.0) * 1000 for times_s in (felt.longest_gap_s, felt.longest_call_s)
    )
    errors = f" **{len(felt.errors)} errors**" if felt.errors else ""
    rss = " → ".join(f"{mib:.0f}" for mib in effects.rss_mib)
    callback = f"{effects.callback.cpu_s * 1000:.0f} ms ({effects.callback.name})"
    print(
        f"| {attack.name}{errors} | {gap_ms:.0f} ms | {call_ms:.0f} ms | {effects.lag_s * 1000:.0f} ms | {callback} "
        f"| {rss} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
