"""Ways to move bytes over a link, one file a transport."""
