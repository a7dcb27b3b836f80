"""The audit: inject defects into the ranks and see which of them the suites detect (docs/audit.md)."""
