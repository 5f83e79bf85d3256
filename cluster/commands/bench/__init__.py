"""`raypd bench`: measures a server of OpenAI's API, or two in turns."""
