"""Shared parts of engine instances of every role: settings, the engine's events on the loop, lease, drain."""
