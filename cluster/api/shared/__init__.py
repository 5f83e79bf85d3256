"""What the gRPC and the HTTP API share: the gate in front of every service, ports, adapters, administration."""
