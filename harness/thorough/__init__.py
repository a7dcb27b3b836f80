"""Thorough runs: rounds of every property, the effort that users ask for, the journal of what was done."""
