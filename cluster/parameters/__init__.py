"""The parameters of requests, and the checks of their values."""
