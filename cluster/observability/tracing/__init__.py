"""Traces of requests for OpenTelemetry: one tree of spans per sampled request, made when the request has ended."""
