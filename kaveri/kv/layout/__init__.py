"""What KV looks like in memory, and how blocks of one layout map to those of another."""
