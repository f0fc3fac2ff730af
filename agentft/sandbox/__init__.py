"""Sandbox (floor 2): runs what the agent wrote, in Docker or bubblewrap, and reports what happened."""
