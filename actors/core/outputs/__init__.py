"""The messages of one step: between scheduler and workers, and from the engine to its clients."""

# The former place of this class, which programs written by the documents of raypd 0.1 import.
from actors.core.outputs.model_runner_output import ModelRunnerOutput as ModelRunnerOutput
