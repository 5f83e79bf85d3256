#!/bin/sh
# Installs raypd into an image. It runs in the repository's root, or in a copy of the files that it needs.
#   install.sh dependencies cpu|cuda    install all dependencies, in the versions with which raypd is tested
#   install.sh raypd                    install raypd itself
# It needs uv. Variables: PYTHON is the environment's interpreter; TORCH_CPU_INDEX is the package index with torch's
# builds without CUDA, if the default index lacks them. A test runs this script in an empty environment.
set -eu
python=${PYTHON:-python}

dependencies() {
    case "$1" in
    cpu)
        install ${TORCH_CPU_INDEX:+--index "$TORCH_CPU_INDEX"} torch
        # xgrammar depends on triton, which takes a gigabyte and is not imported without a GPU.
        echo triton >left_out.txt
        install --requirement pyproject.toml --excludes left_out.txt
        rm left_out.txt
        ;;
    cuda)
        install torch
        # cupy has to be for the same CUDA as torch; otherwise two of NVIDIA's NCCL packages would be installed.
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
