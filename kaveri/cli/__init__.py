"""Command line interface of Kaveri: the `kaveri` command."""
