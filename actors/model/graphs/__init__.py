"""CUDA graphs of decode steps: what a step launches is recorded once, and then launched as one piece."""
