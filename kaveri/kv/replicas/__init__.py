"""Copies of KV caches that belong to requests of other instances."""
