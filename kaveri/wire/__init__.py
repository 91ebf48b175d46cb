"""Converts protobuf to domain values and back, gRPC status to errors and back; names on the wire."""
