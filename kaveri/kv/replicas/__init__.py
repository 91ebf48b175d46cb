"""Replicas: copies of running requests' KV caches at other instances, to resume from after a failure."""
