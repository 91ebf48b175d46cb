"""gRPC plumbing that every service shares: servers, channels, status mapping, message conversion."""
