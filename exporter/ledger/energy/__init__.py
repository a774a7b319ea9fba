"""Energy ledger: energy use, emissions and cost of the runs on this machine."""
