"""What a model's configuration says, and what of it is refused."""
