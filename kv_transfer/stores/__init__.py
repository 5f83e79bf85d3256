"""Places outside of the device where blocks are kept: host memory, and whatever an entry point adds."""
