"""Converts protobuf messages to the values that raypd works with, and back."""
