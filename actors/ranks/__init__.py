"""The further tensor-parallel ranks of an engine: their processes, and the hub that they talk through."""
