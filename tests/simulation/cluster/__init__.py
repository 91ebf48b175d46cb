"""A simulated cluster: the services' own code in one thread, under virtual time and injected faults."""
