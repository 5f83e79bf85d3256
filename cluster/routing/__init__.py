"""Chooses the engines that serve a request. Pure: values in, a route out."""
