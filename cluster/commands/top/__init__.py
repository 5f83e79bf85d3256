"""`raypd top`: the cluster on the terminal, as it is now."""
