"""gRPC plumbing shared by all services: servers, channels, status mapping, message conversion."""
