"""Recording inside the training process, from `Stat.add` to closed windows, with the standard library only."""
