"""Feed: files in shared memory by which training processes pass their recording to the sidecar."""
