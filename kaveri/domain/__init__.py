"""Values that cross contracts: sampling parameters, the cluster's view, lengths. No gRPC, no asyncio."""
