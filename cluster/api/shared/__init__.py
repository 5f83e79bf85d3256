"""What the gRPC and the HTTP API share: calls in progress, ports, administration."""
