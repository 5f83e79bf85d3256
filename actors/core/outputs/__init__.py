"""The messages of one step: between scheduler and workers, and from the engine to its clients."""

# This class was here in raypd 0.1: programs written with that version's documentation import it from here.
from actors.core.outputs.model_runner_output import ModelRunnerOutput as ModelRunnerOutput
