"""What each command does on one host. A job prepares (reads only), then executes."""
