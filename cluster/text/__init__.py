"""Text to tokens and back: input processor, tokenizers, detokenizer, stop strings."""
