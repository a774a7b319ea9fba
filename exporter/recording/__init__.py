"""Recording: from Stat.add to closed windows, inside the training process; standard library only."""
