"""Cluster state: leases of instances, heartbeats with their loads, the view of the cluster, and claims of request
ids."""
