"""The decode service: takes requests with their KV cache and generates their tokens."""
