"""Execution feedback (floor 4): run the calls of a batch, reward them, train on what happened, and trace it."""
