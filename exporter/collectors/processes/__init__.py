"""The processes of the job: which belong to which rank, and what they use."""
