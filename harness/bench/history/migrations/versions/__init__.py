"""A file a schema, in order."""
