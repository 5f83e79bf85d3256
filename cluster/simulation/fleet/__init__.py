"""The engines of a simulated cluster over time: the reconciler, role changes, and the planner, in virtual time."""
