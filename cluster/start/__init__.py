"""How a process brings a raypd cluster up, finds one, and ends one."""
