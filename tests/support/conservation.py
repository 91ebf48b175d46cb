"""Checks that a finished simulation lost no request, ended none twice and left no KV block allocated."""

from kaveri.simulator.simulate import Simulation


def check_conservation(simulation: Simulation) -> None:
    """Assert that each request ended exactly once, and that no request or block is left anywhere."""
    assert all(ends == 1 for ends in simulation.table.ends), "a request ended never, or more than once"
    empty = {name: one.is_empty() for name, one in simulation.prefills.items()}
    empty |= {name: one.is_empty() for name, one in simulation.decodes.items()}
    assert all(empty.values()), f"something is left at an instance: {empty}"
    assert simulation.router.is_empty(), "something is left at the router"
