"""Simulates clusters in virtual time. What decides is the code that serves; steps, links and clients are models."""
