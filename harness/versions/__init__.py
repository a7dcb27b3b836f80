"""Several versions of PyTorch: environments that have them, sessions of tests in each, and the search for the first bad
one (docs/versions.md)."""
