"""The settings of the parts of a cluster, which cluster/config.py puts together."""
