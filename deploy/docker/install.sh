#!/bin/sh
# The image's installation, in the repository's root or a copy of what it needs; a test runs it in an empty environment.
#   install.sh dependencies cpu|cuda    everything but raypd, in the versions that raypd is tested with
#   install.sh raypd                    raypd itself
# PYTHON: of the environment; TORCH_CPU_INDEX: where torch's builds without CUDA are, if the default index lacks them.
set -eu
python=${PYTHON:-python}

dependencies() {
    case "$1" in
    cpu)
        set -- ${TORCH_CPU_INDEX:+--extra-index-url "$TORCH_CPU_INDEX"}
        "$python" -m pip install --constraint constraints.txt "$@" torch
        ;;
    cuda)
        "$python" -m pip install --constraint constraints.txt torch
        # cupy has to be of the CUDA that torch brings, or two of NVIDIA's NCCL packages meet.
        cuda=$("$python" -c 'import torch; print((torch.version.cuda or "none").partition(".")[0])')
        "$python" -m pip install --constraint constraints.txt "cupy-cuda${cuda}x>=14.0"
        ;;
    *)
        echo "VARIANT is '$1'; it can be cpu or cuda" >&2
        exit 2
        ;;
    esac
    "$python" -c '
import pathlib, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
print("\n".join(project["dependencies"]))' > dependencies.txt
    "$python" -m pip install --constraint constraints.txt --requirement dependencies.txt
    rm dependencies.txt
}

what=$1
shift
case "$what" in
dependencies) dependencies "$@" ;;
raypd) "$python" -m pip install --no-deps . ;;
*)
    echo "install.sh $what: it can be dependencies or raypd" >&2
    exit 2
    ;;
esac
