"""What a command says: progress while it works, and its outcome as text, JSON, JUnit and a file."""
