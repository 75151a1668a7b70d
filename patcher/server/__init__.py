"""The server that runs an installation: its HTTP, its start, and what keeps it running."""
