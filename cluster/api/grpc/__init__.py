"""The gRPC door: protos, conversions, the grpc.aio server."""
