"""The HTTP API: OpenAI's API with vLLM's further parameters, on the methods of Serving."""
