"""The energy ledger: what the runs of this machine use, emit and cost."""
