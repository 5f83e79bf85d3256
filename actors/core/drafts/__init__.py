"""Guessed tokens: how many a request gets, and which of them count."""
