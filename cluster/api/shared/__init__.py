"""The code that the gRPC and the HTTP API share: calls in progress, ports, administration."""
