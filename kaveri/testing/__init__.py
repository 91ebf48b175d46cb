"""Conformance suites for engines and KV transports, also those of plug-ins."""
