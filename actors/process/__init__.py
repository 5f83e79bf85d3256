"""Holds what every raypd process uses: bounded child processes, calls to actors, logs, memory, profiling."""
