"""The two sides of the connector that engines use: the scheduler's, and the workers' in layers around the agent."""
