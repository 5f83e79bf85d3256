"""The controller and its parts, which start, watch and replace the engines and ingresses of a cluster."""
