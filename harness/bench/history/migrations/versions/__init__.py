"""The migrations, one file for each schema, in order."""
