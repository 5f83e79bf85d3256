"""`raypd simulate`: lets simulated clusters serve a trace."""
