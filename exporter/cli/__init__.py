"""The command line: configuration, serve, run, check, demo."""
