"""Collectors by subject, and the scheduler."""
