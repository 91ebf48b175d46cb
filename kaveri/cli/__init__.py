"""The kaveri command."""
