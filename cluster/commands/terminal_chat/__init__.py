"""`raypd chat`: a conversation with a running cluster's model, in a terminal."""
