"""One step: who computes how many tokens in it, and what came of it."""
