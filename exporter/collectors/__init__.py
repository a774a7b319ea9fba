"""Collectors: the sidecar's sources, one file per subject."""
