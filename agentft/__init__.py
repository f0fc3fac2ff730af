"""agentft: turn real coding sessions into a better coding agent, on MosaicML Composer."""

__version__ = "0.1.0"
