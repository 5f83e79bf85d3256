"""The engines and ingresses that there are, those that there should be, and how the difference goes away."""
