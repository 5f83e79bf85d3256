"""Which engines there are, which there should be, and how the difference goes away."""
