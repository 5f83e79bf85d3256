"""What clients reach: the gRPC API, the HTTP API, and what both share."""
