"""The connectors that engines use: scheduler side, worker side, several ranks, staging."""
