"""The door for images: from bytes that strangers send to what an engine's encoder takes."""
