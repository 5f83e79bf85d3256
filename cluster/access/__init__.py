"""Who may call, and how much: TLS, bearer tokens, limits and tenants; the same for gRPC and HTTP.

A door asks AccessControl.authenticate() who calls, and keeps the answer with calling_as() while it works on the call.
Requests that are made meanwhile carry their Caller to Serving, which holds them to its limits.
"""
