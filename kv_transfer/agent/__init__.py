"""The agent: the thread that carries transfers out, and its tables of transfers."""
