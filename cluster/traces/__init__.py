"""Traces of requests: the forms in which they are kept in files, and how they are read. No prompt is in any of them."""
