"""The audit: defects are put into the ranks, and it is seen which of them the suites notice (docs/audit.md)."""
