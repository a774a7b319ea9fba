"""The labels that the ledger puts on every series of a process, in the order of the samples."""

IDENTITY_LABELS = ("run", "rank", "worker", "role")
