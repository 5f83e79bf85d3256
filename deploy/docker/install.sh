#!/bin/sh
# The image's installation, in the repository's root or a copy of what it needs; a test runs it in an empty environment.
#   install.sh dependencies cpu|cuda    everything but raypd, in the versions that raypd is tested with
#   install.sh raypd                    raypd itself
# Needs uv. PYTHON: of the environment; TORCH_CPU_INDEX: where torch's builds without CUDA are, if the default index
# lacks them.
set -eu
python=${PYTHON:-python}

dependencies() {
    case "$1" in
    cpu)
        install ${TORCH_CPU_INDEX:+--index "$TORCH_CPU_INDEX"} torch
        # xgrammar asks for triton: a gigabyte, which nothing without a GPU imports.
        echo triton >left_out.txt
        install --requirement pyproject.toml --excludes left_out.txt
        rm left_out.txt
        ;;
    cuda)
        install torch
        # cupy has to be of the CUDA that torch brings, or two of NVIDIA's NCCL packages meet.
        cuda=$("$python" -c 'import torch; print((torch.version.cuda or "none").partition(".")[0])')
        install "cupy-cuda${cuda}x>=14.0"
        install --requirement pyproject.toml
        ;;
    *)
        echo "VARIANT is '$1'; it can be cpu or cuda" >&2
        exit 2
        ;;
    esac
}

install() {
    uv pip install --python "$python" --constraint constraints.txt "$@"
}

what=$1
shift
case "$what" in
dependencies) dependencies "$@" ;;
raypd) uv pip install --python "$python" --no-deps . ;;
*)
    echo "install.sh $what: it can be dependencies or raypd" >&2
    exit 2
    ;;
esac
