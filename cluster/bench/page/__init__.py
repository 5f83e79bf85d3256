"""The result of a benchmark as one page of HTML, which needs no other file and no network."""
