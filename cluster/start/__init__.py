"""Starting, finding and stopping a raypd cluster."""
