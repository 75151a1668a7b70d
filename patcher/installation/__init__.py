"""One installation of the package on a host: found, read, changed, and changed back."""
