"""The ledger: what outlives processes."""
