"""Explanation of hangs: which ranks wait where, and which rank they wait for."""
