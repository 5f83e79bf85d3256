"""Install what tests of quantized checkpoints need beside the environment: `python -m tools.install_quantized [gptq]`

The packages get folders of their own, which those tests alone look into: transformers imports torchao in every process
that finds it. Ends with status 1, and the reason, if they cannot be had; such tests are skipped then.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from tools.install_environment import install

REQUIREMENTS: Final = ("bitsandbytes==0.50.2", "torchao==0.18.0")
FOLDER: Final = Path(sys.prefix) / "quantized"
GPTQ_REQUIREMENTS: Final = (
    *("gptqmodel==7.6.0", "optimum==2.3.0", "torchao==0.18.0", "device-smi==0.5.7", "pypcre==0.6.4", "logbar==0.4.15"),
    *("tokenicer==0.0.14", "defuser==0.0.28", "threadpoolctl==3.8.0", "datasets==5.2.0", "pyarrow==26.0.1"),
    *("dill==0.4.1", "multiprocess==0.70.19", "pandas==3.1.1", "python-dateutil==4.0.0", "six==1.17.0"),
)
"""gptqmodel, and what the environment lacks of its requirements. It asks for an older numpy, and runs with ours."""
GPTQ_FOLDER: Final = Path(sys.prefix) / "quantized_gptq"


def main(arguments: list[str]) -> None:
    """Install the packages into FOLDER, or those for GPTQ and AWQ into GPTQ_FOLDER."""
    if arguments == ["gptq"]:
        # gptqmodel builds its kernels for GPUs otherwise.
        os.environ["BUILD_CUDA_EXT"] = "0"
        print("== installing gptqmodel and optimum (100 MB to download, 310 MB on disk)", flush=True)
        _install("gptqmodel and optimum", GPTQ_FOLDER, ("--no-build-isolation", *GPTQ_REQUIREMENTS))
    else:
        print(f"== installing {' and '.join(REQUIREMENTS)} (47 MB to download, 145 MB on disk)", flush=True)
        _install(" and ".join(REQUIREMENTS), FOLDER, REQUIREMENTS)


def _install(names: str, folder: Path, wanted: tuple[str, ...]) -> None:
    if install("--no-deps", "--target", str(folder), *wanted):
        sys.exit(f"{names} cannot be had")


if __name__ == "__main__":
    main(sys.argv[1:])
