"""Simulates a cluster in virtual time, with the decision code of the services (docs/planning.md)."""
