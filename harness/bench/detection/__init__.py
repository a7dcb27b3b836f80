"""Decide whether figures have changed: detectors, the gate, and how often each is wrong."""
