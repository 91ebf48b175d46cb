"""Plans how many instances a workload needs, and their parallelism. Pure: it runs simulations."""
