"""Plans the number and parallelism of instances that a workload needs, by simulation. Pure."""
