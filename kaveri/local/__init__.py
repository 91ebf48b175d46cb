"""Runs a whole cluster as processes of one machine, for `kaveri up`, the demo, benchmarks and end-to-end tests."""
