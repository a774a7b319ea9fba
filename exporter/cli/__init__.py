"""Commands of `training-exporter` (serve, run, check, stacks, demo, push, assets) and their configuration."""
