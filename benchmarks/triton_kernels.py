"""Compiles the attention kernels, and shows what they take of a GPU: `python -m benchmarks.triton_kernels`

Compiles each kernel for compute capability 8.0, 9.0 and 10.0, and prints the registers of a thread, the bytes that it
spills from registers to memory, and the shared memory of a program in KiB. It needs the package triton, and no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from actors.model.attention.triton_kernels import kernels
from actors.model.attention.triton_kernels.launches import (
    CachePlace,
    Launch,
    LayerCall,
    Tiles,
    attend_launch,
    combine_launch,
    make_parts,
    write_launch,
)
from actors.model.attention.triton_kernels.tile_sizes import most_rows

CAPABILITIES: Final = (80, 90, 100)
HEAD_DIMS: Final = (64, 80, 96, 112, 128, 192, 256)
_TYPES: Final = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
}
_CUOBJDUMP: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True)
class Case:
    """A model's attention, and the GPU to compile for."""

    capability: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    group: int = 4
    window: int = 0
    softcap: float = 0.0
    is_causal: bool = True
    has_sinks: bool = False
    value_size: int | None = None
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """A compiled kernel takes this: registers of a thread, bytes that a thread spills, shared memory of a program.

    num_warps: of a program
    """

    what: str
    num_warps: int
    num_registers: int
    spilled_bytes: int
    shared_bytes: int


def launches(case: Case) -> Iterator[tuple[str, Launch]]:
    """Yield the launches of a layer, by what they are for. Their tensors hold no numbers."""
    num_kv_heads, num_layers, num_blocks, num_tokens = 8, 32, 1000, 64
    value_size, num_heads = case.value_size or case.head_dim, num_kv_heads * case.group
    plane = case.block_size * (case.head_dim + value_size)
    cache = torch.empty(num_blocks, num_kv_heads * num_layers * plane, dtype=case.dtype, device="meta")
    place = CachePlace(plane, num_layers * plane, cache.shape[1], case.block_size, num_kv_heads)
    query, key, value = (
        cache.new_empty(num_tokens, heads, size).transpose(0, 1)
        for heads, size in ((num_heads, case.head_dim), (num_kv_heads, case.head_dim), (num_kv_heads, value_size))
    )
    output = cache.new_empty(num_tokens, num_heads, value_size)
    array = torch.empty(num_tokens, dtype=torch.int32, device="meta")
    call = LayerCall(place, case.head_dim**-0.5, case.softcap, case.window, case.chunk, case.is_causal)
    sinks = cache.new_empty(num_heads) if case.has_sinks else None
    yield "write", write_launch(key, value, cache, array, place)
    most = most_rows(max(case.head_dim, value_size), case.dtype)
    for rows in sorted({16, 32, most.short, most.long}):
        tiles = Tiles(array, array, array, array, array.reshape(1, -1), rows, rows // case.group)
        if rows <= most.short:
            parts = make_parts(output, tiles, place, 8)
            yield f"attend {rows} rows, split", attend_launch(query, cache, output, tiles, call, parts, sinks)
            yield f"combine {rows} rows", combine_launch(output, tiles, parts)
        if rows in (16, most.long):
            yield f"attend {rows} rows", attend_launch(query, cache, output, tiles, call, sinks=sinks)


def compile_ahead(launch: Launch, capability: int) -> tuple[bytes, int]:
    """Compile a launch's kernel for a GPU, as its start would.

    Returns the machine code, and how many bytes of shared memory a program takes.
    """
    kernel = getattr(kernels, launch.kernel)
    signature: dict[str, str] = {}
    constants: dict[str, object] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for index, parameter in enumerate(kernel.params):
        argument = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = argument
            continue
        signature[parameter.name] = _type_name(argument)
        is_aligned = isinstance(argument, Tensor) or (isinstance(argument, int) and argument % 16 == 0)
        if is_aligned and not parameter.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options=launch.options,
    )
    return compiled.asm["cubin"], compiled.metadata.shared


def usage(case: Case, only: str | None = None) -> list[Usage]:
    """Compile the kernels of a case, and return what each takes.

    only: what the one kernel is for that is compiled, as launches() says it; None: all of them
    """
    chosen = ((what, launch) for what, launch in launches(case) if only in (None, what))
    return [_usage(what, launch, case.capability) for what, launch in chosen]


def _type_name(argument: object) -> str:
    if isinstance(argument, Tensor):
        return _TYPES[argument.dtype]
    if isinstance(argument, float):
        return "fp32"
    assert isinstance(argument, int)
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


def _usage(what: str, launch: Launch, capability: int) -> Usage:
    machine_code, shared_bytes = compile_ahead(launch, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        said = subprocess.run([_CUOBJDUMP, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    registers, stack = (re.search(rf"{name}:(\d+)", said) for name in ("REG", "STACK"))
    assert registers is not None, said
    assert stack is not None, said
    # A kernel without local variables in memory has a stack only for what it spills.
    return Usage(what, launch.num_warps, int(registers[1]), int(stack[1]), shared_bytes)


def main() -> None:
    """Print a row for each kernel, head size and GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dims", default=",".join(map(str, HEAD_DIMS)))
    parser.add_argument("--block-sizes", default="16")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--sinks", action="store_true", help="each head has a sink")
    arguments = parser.parse_args()
    head_dims, block_sizes = (list(map(int, text.split(","))) for text in (arguments.head_dims, arguments.block_sizes))
    print("| kernel | head size | block size | warps | " + " | ".join(f"sm_{c}" for c in CAPABILITIES) + " |")
    print("|" + "---|" * (4 + len(CAPABILITIES)))
    for head_dim, block_size in itertools.product(head_dims, block_sizes):
        dtype = getattr(torch, arguments.dtype)
        common = Case(0, head_dim, dtype, block_size, has_sinks=arguments.sinks)
        cases = (replace(common, capability=capability) for capability in CAPABILITIES)
        _print_rows(head_dim, block_size, (usage(case) for case in cases))


def _print_rows(head_dim: int, block_size: int, usages: Iterable[list[Usage]]) -> None:
    for row in zip(*usages, strict=True):
        cells = [f"{one.num_registers}, {one.spilled_bytes}, {one.shared_bytes / 1024:.0f}" for one in row]
        print(f"| {row[0].what} | {head_dim} | {block_size} | {row[0].num_warps} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
