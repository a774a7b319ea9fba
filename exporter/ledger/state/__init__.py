"""State directory: totals that survive restarts of the sidecar."""
