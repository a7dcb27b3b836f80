"""Thorough runs: rounds of every property, the effort that users request, and the journal of progress."""
