"""The job's cgroup: its limits on CPU and memory, and how near it is to them."""
