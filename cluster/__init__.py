"""Holds what users call and what spans several engines. This floor imports Ray, and never torch."""
