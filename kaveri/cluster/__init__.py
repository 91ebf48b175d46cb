"""Cluster state: leases, heartbeats, the view, and the table of requests in flight."""
