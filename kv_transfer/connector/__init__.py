"""The values and interfaces between a scheduler and the code that moves its KV; both import them."""
