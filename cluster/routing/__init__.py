"""Which engines serve a request. Pure: values in, a route out."""
