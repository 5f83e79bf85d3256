"""Knows which prefixes engines have cached: the index, what corrects it, an index for each version of the model."""
