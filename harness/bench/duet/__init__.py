"""Duets: two environments measured in turns on the same machine, and the ratio of each series with an interval."""
