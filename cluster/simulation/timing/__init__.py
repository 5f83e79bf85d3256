"""The durations of simulated steps: from fitted cost models, or from tables of measured operators."""
