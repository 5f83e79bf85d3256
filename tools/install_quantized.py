"""Install what the tests of quantized checkpoints need beside the environment: `python -m tools.install_quantized`

The packages get a folder of their own, which those tests alone look into: transformers imports torchao in every process
that finds it. Ends with status 1, and the reason, if they cannot be had; such tests are skipped then.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tools.install_environment import install

REQUIREMENTS: Final = ("bitsandbytes==0.50.2", "torchao==0.18.0")
FOLDER: Final = Path(sys.prefix) / "quantized"


def main() -> None:
    """Install the packages into FOLDER."""
    print(f"== installing {' and '.join(REQUIREMENTS)} (47 MB to download, 145 MB on disk)", flush=True)
    if install("--no-deps", "--target", str(FOLDER), *REQUIREMENTS):
        sys.exit(f"{' and '.join(REQUIREMENTS)} cannot be had")


if __name__ == "__main__":
    main()
