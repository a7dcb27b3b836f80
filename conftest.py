"""Load Concord's pytest plug-in in a tree where Concord is not installed."""

pytest_plugins = ["harness.plugin"]
