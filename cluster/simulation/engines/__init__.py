"""The simulated engines: the product's scheduler in virtual time, and tokens that are only counted."""
