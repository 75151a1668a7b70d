"""Installs, verifies and removes a series of patches on GPU hosts."""
