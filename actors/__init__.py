"""What runs inside an engine: the scheduler core, model execution, the engine actor."""
