"""Simulates a cluster in virtual time, with the decisions of the services: see docs/planning.md."""
