"""Waiting requests: their order, fairness, grammars and adapters."""
