"""`make soak`: a minute of it, or RAYPD_SOAK_S seconds."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.checkpoints import make_checkpoint
from tests.soak.soak import soak

_DEFAULT_S = 60.0


def main() -> int:
    duration_s = float(os.environ.get("RAYPD_SOAK_S", _DEFAULT_S))
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        result = asyncio.run(soak(make_checkpoint("llama", Path(directory) / "llama"), duration_s))
    for footprint in result.footprints:
        print(footprint)  # noqa: T201
    print(f"{time.monotonic() - began_s:.0f} s:", result.counts)  # noqa: T201
    for mistake in result.mistakes():
        print(f"soak: {mistake}", file=sys.stderr)  # noqa: T201
    return bool(result.mistakes())


if __name__ == "__main__":
    sys.exit(main())
