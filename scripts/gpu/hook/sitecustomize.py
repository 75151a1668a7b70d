"""First in PYTHONPATH of a server whose steps are timed: Python imports it at every start."""

import scripts.gpu.step_times  # noqa: F401  (its import hook is what is wanted)
