"""Decisions as pure functions over snapshots: no clock, no I/O, no grpc, asyncio, redis or torch."""
