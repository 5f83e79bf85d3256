"""`raypd doctor`: what would go wrong, before anything is started. No torch: a child process asks what needs it."""
