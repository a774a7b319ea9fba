"""Explanation of hangs: where each rank waits, and which ranks the others wait for."""
