"""Decode service: receives the KV cache of prefilled requests and generates their tokens."""
