"""The parameters of a request: what may be asked for, and the checks that refuse the rest."""
