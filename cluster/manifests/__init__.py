"""The Kubernetes objects of a cluster, rendered from its settings (`raypd manifests`)."""
