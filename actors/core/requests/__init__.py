"""One request: its state, its parameters, its limits, the names of its blocks."""
