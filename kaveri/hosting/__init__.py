"""Shared parts of service processes: settings, engine events on the event loop, lease, drain."""
