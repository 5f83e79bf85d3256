"""A corpus of textbook Python, written by a program: small exercises, each spelled in many ways."""
