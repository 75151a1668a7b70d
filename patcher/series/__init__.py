"""A series of patches: what it is, read from its directory, written into one, and the diffs that it is made of."""
