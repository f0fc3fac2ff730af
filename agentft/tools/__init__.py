"""Tools (floor 0): what can be called, and how raw output becomes a structured result."""

from agentft.tools.builtin import BUILTIN_TOOLS, TOOL_INDEX, TOOLS
from agentft.tools.spec import FormatError, Parameter, ToolCall, ToolSpec
from agentft.tools.user import USER_TOOLS, Service, UserTool

__all__ = [
    "BUILTIN_TOOLS",
    "TOOLS",
    "TOOL_INDEX",
    "USER_TOOLS",
    "FormatError",
    "Parameter",
    "Service",
    "ToolCall",
    "ToolSpec",
    "UserTool",
]
