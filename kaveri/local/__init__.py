"""A whole cluster as processes of one machine: what `kaveri up`, the demo, benchmarks and end-to-end tests run on."""
