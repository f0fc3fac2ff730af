"""The run configuration (floor 1): what a YAML may say, and how it is read and checked."""
