"""What a rig raises when this machine cannot carry it."""


class RigProblem(Exception):
    """Something the rig needs is missing or failed; the message says what, and what to do."""
