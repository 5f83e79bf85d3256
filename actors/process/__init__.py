"""Tools of every raypd process: bounded child processes, calls to actors, logs, memory, profiling."""
