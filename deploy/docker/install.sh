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
        install ${TORCH_CPU_INDEX:+--extra-index-url "$TORCH_CPU_INDEX"} torch
        install_project "xgrammar"
        # xgrammar asks for triton: a gigabyte, which nothing without a GPU imports. What else it asks for is there now,
        # but for one package.
        install --no-deps xgrammar apache-tvm-ffi
        ;;
    cuda)
        install torch
        # cupy has to be of the CUDA that torch brings, or two of NVIDIA's NCCL packages meet.
        cuda=$("$python" -c 'import torch; print((torch.version.cuda or "none").partition(".")[0])')
        install "cupy-cuda${cuda}x>=14.0"
        install_project ""
        ;;
    *)
        echo "VARIANT is '$1'; it can be cpu or cuda" >&2
        exit 2
        ;;
    esac
}

install() {
    "$python" -m pip install --constraint constraints.txt "$@"
}

# What pyproject.toml asks for, but for one package if one is named.
install_project() {
    "$python" -c '
import pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
print("\n".join(one for one in project["dependencies"] if one.partition(">")[0] != sys.argv[1]))' "$1" > dependencies.txt
    install --requirement dependencies.txt
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
