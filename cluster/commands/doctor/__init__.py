"""`raypd doctor`: checks of the model and the nodes before a start.

This package does not import torch: a child process asks torch about devices.
"""
