"""Lives of requests, prompts and KV copies as pure state machines: no clock, no I/O, no grpc, protobuf or asyncio."""
