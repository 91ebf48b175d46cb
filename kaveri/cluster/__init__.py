"""Cluster state: leases, heartbeats, the view, and claims of requests in flight."""
