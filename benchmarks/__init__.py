"""Measures Kaveri against plainer ways of doing the same work. Each module runs alone."""
