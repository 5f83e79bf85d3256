"""`raypd chat`: a conversation with a running cluster, in a terminal."""
