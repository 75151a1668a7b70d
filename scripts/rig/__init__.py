"""A real SGLang on the CPU and a real sshd on loopback, for the tests and the demo."""
