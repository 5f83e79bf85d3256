"""The gRPC API: the grpc.aio server, its services, and the conversion of messages."""
