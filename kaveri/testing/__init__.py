"""Conformance suites for engines and KV transports, including plug-ins."""
