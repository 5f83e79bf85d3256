"""The APIs that clients reach: gRPC, HTTP, and the code that both share."""
