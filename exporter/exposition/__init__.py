"""Exposition: families to bytes."""
