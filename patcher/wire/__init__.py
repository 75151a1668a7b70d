"""What is sent to a host and what comes back: one request, one reply, and what a reply must look like."""
