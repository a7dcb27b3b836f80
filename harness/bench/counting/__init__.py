"""Counts that do not depend on the time: what a rank needs for a collective or a training step."""
