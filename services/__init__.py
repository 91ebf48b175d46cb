"""The services. They stand on the library `kaveri`, and none imports another but `instance`."""
