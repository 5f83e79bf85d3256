"""The live page /ui: its files, and the stream of snapshots that it draws."""
