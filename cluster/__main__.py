"""`python -m cluster` is `raypd`, where nothing is installed (a Ray job with --working-dir)."""

from cluster.cli import main

main()
