"""Processes of the job: membership, resources and memory."""
