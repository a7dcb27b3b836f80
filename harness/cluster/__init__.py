"""Ranks on other hosts: an agent on each host starts and watches them, and a launcher here makes worlds of them
(docs/clusters.md)."""
