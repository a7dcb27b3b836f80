"""Nights of figures, kept in files and in a database."""
