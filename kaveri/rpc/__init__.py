"""gRPC servers, channels, TLS and process startup, shared by all services."""
