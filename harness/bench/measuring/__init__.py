"""Benchmarks on the ranks: collectives, training steps, and the timing of both."""
