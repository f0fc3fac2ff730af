"""Composer algorithms and callbacks (floor 4)."""
