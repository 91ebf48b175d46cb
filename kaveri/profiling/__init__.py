"""Measures how long an engine's steps take on this machine, and makes of it the file that services are given."""
