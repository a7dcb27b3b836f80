"""The ``concord`` command: one file a subcommand, and what they share."""
