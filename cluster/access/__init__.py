"""Access control for gRPC and HTTP alike: TLS, bearer tokens, limits and tenants.

An API server asks AccessControl.authenticate() who the caller is, and sets the caller with calling_as() while it
handles the call. Requests that are made within carry their Caller to Serving, which enforces the caller's limits.
"""
