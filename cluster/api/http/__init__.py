"""The HTTP door: OpenAI's API, with vLLM's further parameters, on Serving.generate()."""
