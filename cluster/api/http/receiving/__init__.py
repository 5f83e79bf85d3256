"""The reception of calls, before they are worked on: bounds on connections, hosts, tokens, bytes and entries."""
