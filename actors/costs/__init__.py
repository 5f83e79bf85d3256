"""How long an engine's steps take: a model that each engine fits from its own steps, and that routing predicts with."""
