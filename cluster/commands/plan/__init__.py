"""`raypd plan`: how many engines a recorded load needs, before there is a cluster."""
