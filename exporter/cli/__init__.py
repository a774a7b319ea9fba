"""Commands of `training-exporter`: serve, run, check, stacks, demo, push and assets; and their configuration."""
