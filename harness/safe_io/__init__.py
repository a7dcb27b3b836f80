"""Show, read and write safely what other people wrote, or what others may read."""
