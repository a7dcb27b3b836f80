"""What one rank times: collectives and training steps, and how ranks agree on rounds."""
