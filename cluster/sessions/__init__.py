"""An ingress's connections to engines: membership, sessions, streams, canaries."""
