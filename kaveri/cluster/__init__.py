"""Who is in the cluster: leases, heartbeats, the view, and the table of requests in flight."""
