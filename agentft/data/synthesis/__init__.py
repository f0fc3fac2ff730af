"""Repair sessions from any package with tests (floor 3): ``synthesize`` does it all; each stage has a module."""
