"""The connector's two sides, as engines use them: the scheduler's, and the workers' in layers around the agent."""
