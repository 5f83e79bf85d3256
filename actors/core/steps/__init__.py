"""The parts of the scheduler that put one step together and take in its results."""
