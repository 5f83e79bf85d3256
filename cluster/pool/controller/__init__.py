"""The actor that owns a cluster: its start, its rounds, what operators ask of it, what outlives it."""
