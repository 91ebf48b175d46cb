"""For tests of Kaveri and of anybody's plug-in: conformance suites, a local cluster, fault injection."""
