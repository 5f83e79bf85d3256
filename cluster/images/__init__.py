"""Turns images from bytes that clients send into the arrays that an engine's encoder takes."""
