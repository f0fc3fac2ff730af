"""Models (floor 3): backbone, heads, the agent that Composer trains, export."""
