"""Protobuf to domain values and back, gRPC status to errors and back, and the names that travel."""
