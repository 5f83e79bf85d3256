"""The scheduler of an engine and its parts, which import neither torch nor ray."""
