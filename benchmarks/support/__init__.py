"""What the benchmarks share: the harness, the helper processes and the load they send."""
