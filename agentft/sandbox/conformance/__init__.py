"""The conformance suite (floor 2): hostile programs and faults that any engine can be measured against.

``check.py`` says what a check is and runs it on a ``Subject``; the checks are functions of the other modules, a group
each, whose docstring is the promise; ``suite.py`` collects and prints them; ``agentft sandbox check`` runs them.
"""
