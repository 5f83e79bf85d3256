"""The part of an engine that decides. No torch, no ray."""
