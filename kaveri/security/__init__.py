"""Authentication: API keys with their limits, and TLS files."""
