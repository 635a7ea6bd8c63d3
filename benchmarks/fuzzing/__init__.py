"""Hostile bytes for every decoder, session and route (``python -m benchmarks fuzz``; reliability laws L10, L11)."""
