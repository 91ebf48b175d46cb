"""Converts between protobuf messages and domain values, and between gRPC statuses and errors."""
