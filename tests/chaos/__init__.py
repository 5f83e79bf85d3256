"""A whole cluster, as `raypd serve` starts it, under load and under fire: `make chaos` (see CONTRIBUTING.md)."""
