"""Key-value stores for the cache."""
