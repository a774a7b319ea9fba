"""Ledger: totals that continue over restarts of the job's processes and of the sidecar."""
