"""Images: what of them is encoded in which step, and kept."""
