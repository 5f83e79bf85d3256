"""Runs `raypd` as `python -m cluster` where the package is not installed, as in a Ray job with --working-dir."""

from cluster.cli import main

main()
