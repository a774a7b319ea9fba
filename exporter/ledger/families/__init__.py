"""The families of the job, each beside the code that fills it."""
