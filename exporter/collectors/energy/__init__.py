"""Energy of CPUs and memory: registers that wrap, power meters, and what a device draws without work."""
