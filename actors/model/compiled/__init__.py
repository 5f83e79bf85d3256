"""Steps of one token, compiled by torch's inductor into fewer operators that give the same bits."""
