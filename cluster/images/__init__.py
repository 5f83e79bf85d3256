"""Converts images from the bytes that clients send to the arrays that an engine's encoder takes."""
