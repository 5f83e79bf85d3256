"""What happens to a call before it is worked on: connections, hosts, credentials, bytes, entries."""
