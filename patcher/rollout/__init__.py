"""One command over many hosts: the order in which they are changed, and the hosts of one server together."""
