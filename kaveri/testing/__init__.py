"""Conformance suites for engines and KV transports, also for plug-ins."""
