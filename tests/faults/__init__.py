"""The fault matrix: every job, cut at every step of its transaction, by every cause; see run.py."""
