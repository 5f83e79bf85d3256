"""A running cluster's engines and links as they are now: rates instead of totals, and what holds requests back."""
