"""The simulated ingresses: the product's admission, router and recovery decisions in virtual time."""
