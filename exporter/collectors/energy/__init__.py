"""Energy of CPUs and memory: registers, power meters and idle power."""
