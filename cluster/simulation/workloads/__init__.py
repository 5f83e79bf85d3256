"""The requests that a simulation offers: those of traces, and drawn ones."""
