"""The gRPC API: conversions, services, the grpc.aio server."""
