"""Safe display, reading and writing of files and texts that other people wrote or may read."""
