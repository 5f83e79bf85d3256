"""Draft tokens of speculative decoding: how many a request gets, and which of them are used."""
