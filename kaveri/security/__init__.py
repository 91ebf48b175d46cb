"""Who may ask, and who is asked: API keys with their limits, and the files of TLS."""
