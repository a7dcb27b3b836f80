"""Loads the plug-in where Concord is not installed; nothing else."""

pytest_plugins = ["harness.plugin"]
