"""OpenAI-compatible HTTP API: accepts HTTP requests, forwards them to routers, and streams the answers back."""
