"""Benchmarks: timing on ranks, figures, history, and the nightly gate."""
