"""Programs and ports of a host, reached as `ssh` itself would reach it, or on this machine."""
