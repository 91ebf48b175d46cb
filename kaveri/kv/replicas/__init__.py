"""Replicas: copies of running requests' KV caches in other instances' host memory, to resume from after a failure."""
