"""Chooses the engines that serve a request. Pure: routers get values and return a route."""
