"""Restart adapters: one module for each way in which a server is kept running."""
