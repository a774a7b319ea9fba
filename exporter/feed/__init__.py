"""The feed: the border between training processes and the sidecar."""
