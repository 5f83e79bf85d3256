"""The HTTP API: OpenAI's, with vLLM's further parameters, on Serving.generate()."""
