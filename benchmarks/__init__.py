"""Measures Kaveri against plainer ways of doing the same work. Each module runs alone."""

# Sets the environment that gRPC reads when it is imported, as services have it.
import kaveri  # noqa: F401
