"""The values and interfaces between a scheduler and what moves its KV, which both sides import."""
