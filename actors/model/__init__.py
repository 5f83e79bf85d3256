"""The part of an engine that computes: torch and transformers, no ray."""
