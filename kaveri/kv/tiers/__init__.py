"""Storage of KV blocks: pools and block allocators."""
