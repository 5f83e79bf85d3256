"""The ingresses of a cluster in the controller: which are wanted, where they run, their start, health and end."""
