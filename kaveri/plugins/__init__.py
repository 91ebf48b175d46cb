"""Finds transports, engines and policies by name: Kaveri's own and those of other packages."""
