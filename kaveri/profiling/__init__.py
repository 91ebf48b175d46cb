"""Measures how long an engine's steps take on this machine, and writes a profile file for its services."""
