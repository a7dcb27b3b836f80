"""`concord probe`: what a backend can do, found out by trying."""
