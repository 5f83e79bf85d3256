"""Access control for gRPC and HTTP alike: TLS, bearer tokens, limits and tenants.

An API asks AccessControl.authenticate() who calls, and keeps the answer with calling_as() while it works on the call.
Requests that are made meanwhile carry their Caller to Serving, which holds them to its limits.
"""
