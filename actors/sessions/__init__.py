"""Runs the engine's end of sessions with ingresses: messages, server; and the encoding of images by other engines."""
