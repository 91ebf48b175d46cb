"""Where KV blocks live: pools and the allocators of their blocks."""
