"""Runs a model: one contract (contract.py) and its implementations."""
