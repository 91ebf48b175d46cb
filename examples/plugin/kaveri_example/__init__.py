"""Plug-ins for Kaveri: an engine, a KV transport and a policy."""
