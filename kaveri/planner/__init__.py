"""Plans how many instances a workload needs, and with which parallelism. Pure: it asks the simulator."""
