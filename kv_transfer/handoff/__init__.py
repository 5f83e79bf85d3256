"""The handoff protocol, without I/O: a machine for each end of a transfer."""
