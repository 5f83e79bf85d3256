"""Lets the processes of one cluster prove to each other that they belong to the cluster."""
