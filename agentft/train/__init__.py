"""Training runs (floor 5): configuration to objects in ``build.py``, a run from start to summary in ``run.py``."""
