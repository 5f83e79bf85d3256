"""The commands of `raypd`, a module for each kind; cluster/cli.py puts them together."""
