"""The code of an engine: scheduler, model, workers, ranks, and the processes that they run in."""
