"""Reads the files of a checkpoint other than its weights: adapters, generation defaults, pooling."""
