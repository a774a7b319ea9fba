"""The job's cgroup: its limits on CPU, memory, I/O and processes, and how near it is to them."""
