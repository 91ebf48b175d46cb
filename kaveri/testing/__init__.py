"""Tools for tests of Kaveri and of plug-ins: conformance suites, a local cluster, fault injection."""
