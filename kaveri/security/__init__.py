"""Who may ask: API keys with their limits."""
