"""Try a running server: the suite, the run, its checks, and what they found."""
