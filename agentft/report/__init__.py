"""Reports (floor 5): reward traces and the state of this machine, in the terminal."""
