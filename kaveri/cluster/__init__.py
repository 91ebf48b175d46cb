"""Cluster state: leases and loads of instances, the view of the cluster, and claims of request ids."""
