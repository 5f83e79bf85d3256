"""The ways to move bytes over a link: between GPUs by NCCL, between CPUs by TCP or shared memory, within a process."""
