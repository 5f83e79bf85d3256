"""A GPU that computes on the CPU, so that tests can walk a GPU's branches on a machine without one.

torch lets a program bring a device of its own ("private use"). Tensors of this one hold their numbers in host memory,
and every operator computes on them there, so tokens can be compared. What differs on a GPU is checked at each operator:

- Tensors of an operator lie on one device; only copies join two. A mix raises MixedDevices.
- An operator that makes the host wait is recorded, with the function of the project that called it: reading a number,
  results whose size depends on numbers, a copy to the host, and a copy from host memory that is not pinned.
- A copy to pinned memory arrives when an event behind it has been waited for; the memory holds other numbers before.
- Memory that a queued copy reads must not change until the copy is done.
- Work on a side stream must have waited for an event. For the blocks of an engine's KV cache it has to be the right
  one: behind the last write of a block that is read, and behind the last use of one that is written (block_order.py).
  For other memory this is not seen, since the device does all work in the order in which it is queued.
- The ends of a data link copy on side streams of their own, as NCCL does (transport.py).
- A graph records operators, and replays them on the same memory. While it records, nothing may wait. Before a replay,
  all that the graph computes is overwritten, and so is what other graphs of its pool have computed; memory that it
  reads must still belong to a tensor. So a replay that reads anything but static memory gives other numbers, or raises.

FakeTensorMode would find mixed devices and waits too, but it has no numbers: a step that looks at its tokens cannot go
on, and a replay could not be compared with the eager step.

torch takes such a device once for each process, so tests that use it run in processes of their own.
"""
