"""How fast KV crosses between two processes."""
