"""The faults of a simulation: their values, and the file that lists them."""
