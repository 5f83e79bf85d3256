"""The controller's side of the planner: what it is told, the child process that it runs in, and its targets' ways."""
