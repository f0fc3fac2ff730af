"""Evaluation (floor 4): heads beside baselines, and replay of held-out sessions."""
