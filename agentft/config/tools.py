"""Tools of the user (floor 1): YAML files → ``UserTool``s, checked as strictly as a run's configuration.

    tools, problems = read_tools(["yamls/tools/sql.yaml"])
    use_tools(config.tools)      # raises, or makes them the tools of this process

A file holds one tool, or a list of them under ``tools``. See docs/user-tools.md for the keys.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml

from agentft.config.load import InvalidConfigError
from agentft.errors import ConfigError
from agentft.etai import ExecutionResult
from agentft.tools import BUILTIN_TOOLS, Parameter, Service, ToolSpec, UserTool
from agentft.tools.spec import ParameterType
from agentft.tools.user import use

KEYS = {
    "name": str,
    "description": str,
    "parameters": dict,
    "command": list,
    "python": str,
    "image": str,
    "service": dict,
    "timeout_s": (int, float),
    "deterministic": bool,
    "runs_code": bool,
    "fields": list,
}
SCHEMA_KEYS = ("type", "properties", "required", "additionalProperties")
PROPERTY_KEYS = ("type", "description", "refers_to")
RESERVED = {*ExecutionResult.model_fields, "timed_out"}
SERVICE_KEYS = {"image": str, "command": list, "port": int}
_NAME = re.compile(r"[a-z][a-z0-9_]{1,39}")


def use_tools(files: Sequence[str]) -> None:
    """Make the tools of these files the user's tools of this process (none: only the built-in ones).

    Raises:
        InvalidConfigError: with everything that is wrong in them.
    """
    tools, problems = read_tools(files)
    if problems:
        raise InvalidConfigError(problems, " ".join(files))
    use(tools)


def read_tools(files: Sequence[str]) -> tuple[list[UserTool], list[ConfigError]]:
    """Return the tools of these files in their order, and everything that is wrong with them."""
    tools: list[UserTool] = []
    problems: list[ConfigError] = []
    taken = {spec.name: "a built-in tool" for spec in BUILTIN_TOOLS}
    for file in files:
        for node, where in _entries(file, problems):
            reader = _Reader(Path(file), where, problems)
            tool = reader.tool(node)
            if tool is not None and tool.spec.name in taken:
                reader.wrong("this name is taken", got=tool.spec.name, expected=f"not that of {taken[tool.spec.name]}")
            elif tool is not None:
                taken[tool.spec.name] = f"another tool in {where}"
                tools.append(tool)
    return tools, problems


def _entries(file: str, problems: list[ConfigError]) -> Iterable[tuple[Any, str]]:
    try:
        text = Path(file).read_text(encoding="utf-8")
        root, whole = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except OSError as error:
        problems.append(ConfigError("the file of tools cannot be read", where=file, got=error.strerror))
        return []
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problems.append(ConfigError("the file of tools is not YAML", where=file, got=str(error).splitlines()[0]))
        return []
    if isinstance(whole, dict) and list(whole) == ["tools"] and isinstance(whole["tools"], list):
        items = root.value[0][1].value
        return [
            (entry, f"{file}:{item.start_mark.line + 1}") for entry, item in zip(whole["tools"], items, strict=True)
        ]
    return [(whole, f"{file}:{root.start_mark.line + 1 if root else 1}")]


class _Reader:
    """Reads one tool; whatever is wrong goes to ``problems``."""

    def __init__(self, file: Path, where: str, problems: list[ConfigError]) -> None:
        self.file, self.where, self.problems, self.failed = file, where, problems, False

    def wrong(self, what: str, **parts: Any) -> None:
        """Note a problem."""
        self.failed = True
        self.problems.append(ConfigError(what, where=self.where, **parts))

    def tool(self, node: Any) -> UserTool | None:
        """Return the tool, or None if it cannot be used."""
        if not isinstance(node, dict):
            self.wrong("a tool is a mapping of keys", got=node, expected=", ".join(KEYS))
            return None
        node = self._known(node, KEYS, "tool")
        for key in ("name", "description"):
            if not node.get(key):
                self.wrong(f"{key} is missing")
        if node.get("name") and not _NAME.fullmatch(node["name"]):
            self.wrong("not a name of a tool", got=node["name"], expected="small letters, digits and _, 2 to 40")
        if ("command" in node) == ("python" in node):
            self.wrong("a tool has either `command` or `python`")
        if "image" in node and "service" in node:
            self.wrong("a tool with an image of its own has no network, and so no service", hint="remove one of them")
        if node.get("timeout_s", 1) <= 0:
            self.wrong("timeout_s is out of range", got=node["timeout_s"], expected="more than 0")
        parameters = self._parameters(node.get("parameters", {}))
        command, fields = self._words(node.get("command", []), "command"), self._words(node.get("fields", []), "fields")
        for name in sorted(RESERVED.intersection(fields)):
            self.wrong("this field is part of every result", got=name, expected="another name")
        if "command" in node and not command:
            self.wrong("command is empty", expected="a list of words")
        source, function = self._function(node["python"]) if "python" in node else ("", "")
        service = self._service(node["service"]) if "service" in node else None
        if self.failed:
            return None
        spec = ToolSpec(
            name=node["name"],
            description=node["description"],
            parameters=parameters,
            deterministic=node.get("deterministic", False),
            runs_code=node.get("runs_code", False),
            fields=fields,
        )
        return UserTool(
            spec=spec,
            command=command,
            source=source,
            function=function,
            image=node.get("image"),
            service=service,
            timeout_s=node.get("timeout_s"),
        )

    def _known(self, node: Mapping[str, Any], keys: Mapping[str, Any], of: str) -> dict[str, Any]:
        """Return the known keys whose values are of the right type."""
        kept: dict[str, Any] = {}
        for key, value in node.items():
            if key not in keys:
                close = difflib.get_close_matches(str(key), list(keys), n=1)
                hint = f"did you mean {close[0]}?" if close else f"keys of a {of} are {', '.join(keys)}"
                self.wrong(f"unknown key {key}", hint=hint)
            elif not isinstance(value, keys[key]) or (isinstance(value, bool) and keys[key] is not bool):
                names = keys[key] if isinstance(keys[key], tuple) else (keys[key],)
                self.wrong(
                    f"{key} has the wrong type", got=value, expected=" or ".join(kind.__name__ for kind in names)
                )
            else:
                kept[key] = value
        return kept

    def _words(self, value: list[Any], key: str) -> tuple[str, ...]:
        if not all(isinstance(word, str) for word in value):
            self.wrong(f"{key} is a list of texts", got=value, hint="put numbers in quotes")
            return ()
        return tuple(value)

    def _parameters(self, schema: Mapping[str, Any]) -> tuple[Parameter, ...]:
        """Return the arguments of a JSON Schema object (its properties with type and description)."""
        for key in schema:
            if key not in SCHEMA_KEYS:
                self.wrong(f"parameters.{key} has no effect", expected=f"a JSON Schema of {', '.join(SCHEMA_KEYS)}")
        if schema.get("type", "object") != "object":
            self.wrong("parameters.type is not object", got=schema["type"])
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            self.wrong(
                "parameters has the wrong form", expected="properties: {name: {type, description}}, required: []"
            )
            return ()
        for name in required:
            if name not in properties:
                self.wrong(f"parameters.required names {name}, which is no property", expected=", ".join(properties))
        return tuple(
            parameter
            for name, about in properties.items()
            if (parameter := self._parameter(name, about, name in required)) is not None
        )

    def _parameter(self, name: str, about: Any, required: bool) -> Parameter | None:
        kinds = get_args(ParameterType)
        if not isinstance(about, dict) or about.get("type") not in kinds:
            got = about.get("type") if isinstance(about, dict) else about
            self.wrong(f"parameters.properties.{name}.type is unknown", got=got, expected=", ".join(kinds))
            return None
        for key in about:
            if key not in PROPERTY_KEYS:
                expected = ", ".join(PROPERTY_KEYS)
                self.wrong(f"parameters.properties.{name}.{key} has no effect", expected=expected)
        if about.get("refers_to") not in (None, "file", "line"):
            self.wrong(f"{name}.refers_to is unknown", got=about["refers_to"], expected="file or line")
        return Parameter(
            name=str(name),
            type=about["type"],
            description=str(about.get("description", "")),
            required=required,
            refers_to=about.get("refers_to"),
        )

    def _function(self, text: str) -> tuple[str, str]:
        """Return (source, name) of ``file.py:function``; the file lies beside the YAML."""
        file, _, function = text.rpartition(":")
        path = self.file.parent / file
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError) as error:
            self.wrong(
                "the Python file of the tool cannot be read", got=f"{path}: {error}", expected="file.py:function"
            )
            return "", ""
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        if function not in names:
            self.wrong(f"{path} has no function {function}", expected=" or ".join(names))
        return source, function

    def _service(self, node: Mapping[str, Any]) -> Service | None:
        known = self._known(node, SERVICE_KEYS, "service")
        for key in SERVICE_KEYS:
            if key not in node:
                self.wrong(f"service.{key} is missing")
        command = self._words(known.get("command", []), "service.command")
        if not 1 <= known.get("port", 1) <= 65535:
            self.wrong("service.port is out of range", got=known["port"], expected="1 to 65535")
        if self.failed:
            return None
        return Service(image=known["image"], command=command, port=known["port"])
