"""Sends load to a cluster and reports the results."""
