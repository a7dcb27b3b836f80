"""`concord probe`: find out by trying what a backend can do."""
