"""The simulated GPU's tensors, and the checks that each of their operators goes through."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.simulated_gpu.block_order import ORDER, Unordered
from tests.simulated_gpu.kernels import KERNELS

DEVICE_NAME: Final = "simgpu"
_ROOT: Final = Path(__file__).parents[2]
_FLOORS: Final = tuple(f"{_ROOT / floor}/" for floor in ("actors", "kv_transfer"))

_CONVERSIONS: Final = {"aten::_to_copy", "aten::to"}
_BY_INDEX: Final = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_READING: Final = {"aten::is_nonzero", "aten::item", "aten::equal", "aten::allclose"}
_REPEAT: Final = "aten::repeat_interleave"
_GROUPED: Final = "aten::_grouped_mm"
"""torch has a kernel for bfloat16 on compute capability 9.0; for other types it copies the groups' ends to the host."""
_WAITING_TAGS: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class MixedDevices(RuntimeError):
    """An operator got tensors of both devices."""


class WaitsInGraph(RuntimeError):
    """The host would wait for the device while a graph records."""


class ChangedTooEarly(RuntimeError):
    """Host memory was changed before a queued copy had read it."""


class _Thread(threading.local):
    """Holds one thread's stream. waited: the point up to which the side stream has waited; -1 for no event"""

    side_stream: Any = None
    waited: int = -1


class Recorder(Protocol):
    """A graph that records."""

    def record(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Take an operator, with host tensors for arguments and results."""

    def allocate(self, memory: Tensor) -> None:
        """Take memory that is allocated."""


@dataclass
class Simulation:
    """The device's state: what waited, what is queued, and which memory tensors have."""

    waits: Counter[str] = field(default_factory=Counter)
    """How often the host waited, by the function of the project that made it wait."""
    reasons: dict[str, str] = field(default_factory=dict)
    """The operator with which each of these functions waited last."""
    pinned: set[int] = field(default_factory=set)
    """The addresses of pinned memory."""
    queued: list[Callable[[], None]] = field(default_factory=list)
    """Copies to the host that have not arrived, and checks of memory that queued copies read."""
    num_queued: int = 0
    num_done: int = 0
    owners: Counter[int] = field(default_factory=Counter)
    """How many of the device's tensors each piece of memory has, by its address."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while what is queued or counted changes: stores and ranks have threads."""
    thread: _Thread = field(default_factory=_Thread)
    recorder: Recorder | None = None
    thread_of_recorder: int = 0

    def wait(self, reason: str) -> None:
        """Record that the host waits for all that is queued."""
        if self.is_recording:
            raise WaitsInGraph(f"{_caller()} waits while a graph records: {reason}")
        caller = _caller()
        with self.lock:
            self.waits[caller] += 1
            self.reasons[caller] = reason
        self.finish(self.num_queued)

    @property
    def is_recording(self) -> bool:
        """Whether a graph records what this thread does."""
        return self.recorder is not None and self.thread_of_recorder == threading.get_ident()

    def queue(self, work: Callable[[], None]) -> None:
        """Queue what happens when the host has waited."""
        with self.lock:
            self.queued.append(work)
            self.num_queued += 1

    def finish(self, until: int) -> None:
        """Do what is queued before a point."""
        with self.lock:
            while self.num_done < until:
                work = self.queued.pop(0)
                self.num_done += 1
                work()

    def take_waits(self) -> dict[str, int]:
        """Return the waits since the last call."""
        with self.lock:
            waits, self.waits = dict(self.waits), Counter()
        return waits


SIMULATION: Final = Simulation()


class DeviceTensor(torch.Tensor):
    """A tensor of the device. host: its numbers, in host memory"""

    host: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        # No inference tensors: a view that is made in inference mode of a tensor from outside of it is an ordinary one.
        with torch.inference_mode(False):
            made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=torch.device(DEVICE_NAME, 0),
            )
        made.host = inner
        address = memory_of(inner)
        SIMULATION.owners[address] += 1
        weakref.finalize(made, _disown, address)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})

    def tolist(self) -> Any:
        SIMULATION.wait("tolist")
        return self.host.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise MixedDevices("numpy() of a tensor on the device")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MixedDevices("a tensor on the device is pickled")

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]  # torch declares it in its own way
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


def memory_of(tensor: Tensor) -> int:
    """Return the address of a host tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def _disown(address: int) -> None:
    SIMULATION.owners[address] -= 1


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator on the host, after the checks of the device."""
    name = func._schema.name
    if SIMULATION.thread.side_stream is not None and SIMULATION.thread.waited < 0:
        raise Unordered(f"{_caller()}: {name} on a side stream that has waited for no event")
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    call = _Call(func, *tree_map(_inner, (args, dict(kwargs))))
    call.kwargs.pop("pin_memory", None)
    if name == "aten::copy_" and len({type(tensor) for tensor in tensors}) == 2:
        _copy_across(call, target=tensors[0])
        return args[0]
    if name in _CONVERSIONS and any(isinstance(leaf, torch.device) and leaf.type == "cpu" for leaf in leaves):
        return _copy_to_host(call)
    _check_devices(name, tensors)
    if _waits(func, name, call):
        SIMULATION.wait(name)
    outputs = call.compute()
    resized = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor) and tensor.shape != tensor.host.shape]
    assert not resized, f"{name} resizes a tensor of the device, which this simulation does not know"
    return _wrap(outputs, tensors)


@dataclass(frozen=True)
class _Call:
    """An operator with host tensors for arguments."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def compute(self) -> Any:
        """Compute it, and let a graph record it."""
        func = KERNELS.get(self.func._schema.name) or self.func
        if SIMULATION.thread.side_stream is None:
            ORDER.queue(func, self.args, self.kwargs)
        else:
            ORDER.check(func, self.args, self.kwargs, SIMULATION.thread.waited)
        outputs = func(*self.args, **self.kwargs)
        if SIMULATION.is_recording:
            assert SIMULATION.recorder is not None
            SIMULATION.recorder.record(func, self.args, self.kwargs, outputs)
        return outputs

    @property
    def is_queued(self) -> bool:
        """Whether a copy asks the host not to wait."""
        names = [argument.name for argument in self.func._schema.arguments]
        place = names.index("non_blocking")
        return bool(self.args[place] if place < len(self.args) else self.kwargs.get("non_blocking", False))


def _copy_to_host(call: _Call) -> Tensor:
    """Make a copy in host memory, which torch pins if the host is not to wait."""
    if not call.is_queued:
        SIMULATION.wait("copy to the host")
    copied: Tensor = call.func(*call.args, **call.kwargs)
    if not call.is_queued:
        return copied.clone() if copied is call.args[0] else copied
    target = pin(copied)
    _deliver(target, copied)
    return target


def _copy_across(call: _Call, target: Tensor) -> None:
    """Copy into existing memory of the other device."""
    host = call.args[1] if isinstance(target, DeviceTensor) else call.args[0]
    if not (call.is_queued and is_pinned(host)):
        direction = "from" if host is call.args[1] else "to"
        SIMULATION.wait(f"copy {direction} the host" + (", whose memory is not pinned" if call.is_queued else ""))
    elif host is call.args[0]:
        _deliver(host, call.args[1])
        return
    else:
        _watch(host)
    call.compute()


def _deliver(target: Tensor, source: Tensor) -> None:
    """Queue a copy to pinned memory, which holds other numbers until the host has waited."""
    if SIMULATION.is_recording:
        raise WaitsInGraph("a copy to the host is recorded")
    arriving = source.clone()
    poison(target)
    SIMULATION.queue(lambda: _arrive(target, arriving))


def _arrive(target: Tensor, source: Tensor) -> None:
    with torch.inference_mode():
        target.copy_(source)


def _watch(source: Tensor) -> None:
    """See at the next wait that the memory of a queued copy was not changed before."""
    before, caller = source.clone(), _caller()

    def check() -> None:
        if not torch.equal(_octets(source), _octets(before)):
            raise ChangedTooEarly(f"memory that {caller} copies to the device was changed before the copy was done")

    SIMULATION.queue(check)


def _octets(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def poison(tensor: Tensor) -> None:
    """Overwrite a host tensor with numbers that nobody expects, though indices made of them stay in bounds."""
    with torch.inference_mode():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


def pin(tensor: Tensor) -> Tensor:
    """Return a host tensor in memory that counts as pinned until it is freed."""
    pinned = tensor.clone(memory_format=torch.contiguous_format)
    address = memory_of(pinned)
    SIMULATION.pinned.add(address)
    weakref.finalize(pinned.untyped_storage(), SIMULATION.pinned.discard, address)
    return pinned


def is_pinned(tensor: Tensor) -> bool:
    """Whether a host tensor lies in pinned memory."""
    return memory_of(tensor) in SIMULATION.pinned


def _inner(leaf: Any) -> Any:
    if isinstance(leaf, DeviceTensor):
        return leaf.host
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _wrap(outputs: Any, arguments: Sequence[Tensor]) -> Any:
    """Return results as tensors of the device; an argument that is changed in place is returned as it came."""
    same = {id(leaf.host): leaf for leaf in arguments if isinstance(leaf, DeviceTensor)}
    return tree_map(
        lambda leaf: (
            same.get(id(leaf)) if id(leaf) in same else DeviceTensor(leaf) if isinstance(leaf, Tensor) else leaf
        ),
        outputs,
    )


def _check_devices(name: str, tensors: Sequence[Tensor]) -> None:
    """Allow numbers of the host, as tensors without dimensions, beside tensors of the device, and nothing else."""
    foreign = [tuple(tensor.shape) for tensor in tensors if not isinstance(tensor, DeviceTensor) and tensor.dim()]
    if foreign:
        raise MixedDevices(f"{_caller()}: {name} has host tensors of shapes {foreign} beside the device's")


def _waits(func: Any, name: str, call: _Call) -> bool:
    """Whether the host has to know numbers of the device before it can go on."""
    if name in _BY_INDEX:
        return _finds_indices(name, call.args)
    if name == _GROUPED:
        return call.args[0].dtype is not torch.bfloat16
    if name == _REPEAT:
        # The result's size is the sum of the repeats, which the host knows if it gives one number for all.
        return func._overloadname != "self_int" and call.kwargs.get("output_size") is None
    return name in _READING or any(tag in func.tags for tag in _WAITING_TAGS)


def _finds_indices(name: str, inner_args: Sequence[Any]) -> bool:
    """Whether a mask among the indices has to be turned into indices, whose number the host has to know."""
    if not any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in inner_args[1]):
        return False
    return name == "aten::index" or inner_args[2].numel() != 1


def _caller() -> str:
    """Return the innermost function of the project on the stack, as path:function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_FLOORS):
            return f"{Path(path).relative_to(_ROOT)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"
