"""From a YAML file and ``key=value`` overrides to a ``RunConfig`` (floor 1); every error at once.

    config = load("yamls/agent/tiny-glm.yaml", ["train.duration=5ba"])

Nothing heavy is imported. A schedule section that names its ``kind`` starts afresh, so that no field of the
default schedule is left in it.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agentft.config.checks import Problem, check
from agentft.config.describe import field_docs, section_of, spell_type, types_by_key
from agentft.config.schema import RunConfig, ScheduleConfig
from agentft.errors import ConfigError

_PLACEHOLDERS = {"run_name": "run", "data.shards": "shards", "train.duration": "1ep"}
"""Stand in for missing keys while the cross-checks run, so that those errors are shown too."""


class InvalidConfigError(ConfigError):
    """Every problem of one configuration, each with its place. ``problems`` holds them in the order of the file."""

    def __init__(self, problems: Sequence[ConfigError], source: str) -> None:
        self.problems = list(problems)
        noun = "error" if len(self.problems) == 1 else "errors"
        super().__init__(f"{len(self.problems)} {noun} in {source}")

    def render(self) -> str:
        """Return the count and every problem, one block each."""
        return "\n".join([self.what, *(problem.render() for problem in self.problems)])


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One value as the user gave it: ``where`` is ``file:line`` or the override itself."""

    key: str
    value: Any
    where: str


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    world_size: int = 1,
    more_checks: Callable[[RunConfig], Iterable[Problem]] | None = None,
) -> RunConfig:
    """Read, merge, convert and cross-check.

    Args:
        path: YAML file.
        overrides: ``key=value`` each; the value is read as YAML.
        world_size: Processes that share the global batch.
        more_checks: Further checks of the whole configuration, by callers on higher floors.

    Raises:
        InvalidConfigError: with everything that is wrong.
    """
    problems: list[ConfigError] = []
    from_file = _read_file(Path(path), problems)
    from_overrides = _read_overrides(overrides, problems)
    tree = _writable(OmegaConf.structured(RunConfig))
    for settings in (from_file, from_overrides):
        _apply(tree, settings, problems)
    places = {s.key: s.where for s in (*from_file, *from_overrides)}
    _add_missing(tree, problems, places, str(path))
    _resolve(tree, problems, places, str(path))
    config = OmegaConf.to_object(tree)
    assert isinstance(config, RunConfig)
    broken = {p.key for p in problems if isinstance(p, _KeyError)}
    for problem in (*check(config, world_size=world_size), *(more_checks(config) if more_checks else ())):
        if not broken.intersection(problem.keys):
            problems.append(_from_problem(problem, places, str(path)))
    if problems:
        raise InvalidConfigError(sorted(problems, key=_line), " ".join([str(path), *overrides]))
    return config


def to_yaml(config: RunConfig) -> str:
    """Return the resolved configuration as YAML that ``load`` reads back to an equal ``RunConfig``."""
    plain = asdict(config)
    plain["optimizer"]["betas"] = list(config.optimizer.betas)
    return yaml.safe_dump(plain, sort_keys=False)


class _KeyError(ConfigError):
    """A problem of one key."""

    def __init__(self, key: str, what: str, **parts: Any) -> None:
        self.key = key
        super().__init__(what, **parts)


def _line(problem: ConfigError) -> float:
    """Order problems as a reader meets them: by line, then what has no line, then overrides."""
    where = problem.where or ""
    match = re.search(r":(\d+)$", where)
    return float("inf") if where.startswith("override ") else int(match[1]) if match else 1e9


def _from_problem(problem: Problem, places: dict[str, str], path: str) -> ConfigError:
    found = [place for key in problem.keys if (place := _place(key, places))]
    where = next((place for place in found if place.startswith("override ")), found[0] if found else path)
    return _KeyError(
        problem.keys[0], problem.what, where=where, got=problem.got, expected=problem.expected, hint=problem.hint
    )


def _place(key: str, places: dict[str, str]) -> str | None:
    """Return where a key was given; for a section, where its first key was."""
    return places.get(key) or next((place for k, place in places.items() if k.startswith(f"{key}.")), None)


def _read_file(path: Path, problems: list[ConfigError]) -> list[Setting]:
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise InvalidConfigError(
            [ConfigError("the file cannot be read", where=str(path), got=error.strerror)], str(path)
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problems.append(_not_yaml(error, str(path)))
        raise InvalidConfigError(problems, str(path)) from None
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        problem = ConfigError("the file is not a mapping of keys", where=str(path), expected="`key: value` lines")
        raise InvalidConfigError([problem], str(path))
    return list(_flatten(node, "", lambda n: f"{path}:{n.start_mark.line + 1}", problems))


def _not_yaml(error: Exception, path: str) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark else path
    text = getattr(error, "problem", None) or str(error)
    return ConfigError("the file is not YAML", where=where, got=text, hint="check indentation, quotes and brackets")


def _read_overrides(overrides: Sequence[str], problems: list[ConfigError]) -> list[Setting]:
    found: list[Setting] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        where = f"override {text}"
        if not equals or not key:
            problems.append(ConfigError("not an override", where=where, expected="key=value"))
            continue
        try:
            node = yaml.compose(value, Loader=yaml.SafeLoader) or yaml.ScalarNode("tag:yaml.org,2002:null", "")
        except yaml.YAMLError as error:
            problems.append(ConfigError("the value is not YAML", where=where, got=str(error).splitlines()[0]))
            continue
        found.extend(_setting(key, node, lambda _, where=where: where, where, problems))  # type: ignore[misc]
    return found


def _flatten(
    node: yaml.MappingNode, prefix: str, where: Callable[[yaml.Node], str], problems: list[ConfigError]
) -> Iterator[Setting]:
    """Yield the leaves under a mapping; unknown and repeated keys become problems."""
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        if key in seen:
            problems.append(_KeyError(key, f"{key} is given twice", where=where(key_node), hint="keep one of them"))
            continue
        seen.add(key)
        yield from _setting(key, value_node, where, where(key_node), problems)


def _setting(
    key: str, node: yaml.Node, where: Callable[[yaml.Node], str], place: str, problems: list[ConfigError]
) -> Iterator[Setting]:
    kind = types_by_key().get(key)
    if kind is None:
        problems.append(_KeyError(key, f"unknown key {key}", where=place, hint=_suggest(key)))
    elif section_of(kind) and isinstance(node, yaml.MappingNode):
        yield from _flatten(node, f"{key}.", where, problems)
    else:
        try:
            value = _construct(node, kind)
        except yaml.YAMLError as error:
            problems.append(_KeyError(key, f"{key} cannot be read", where=place, got=str(error).splitlines()[0]))
            return
        problem = _wrong_kind(key, kind, value)
        if problem:
            got = "nothing" if value is None else value
            hint = f"write {{start: {value}}}" if kind is ScheduleConfig and isinstance(value, int | float) else None
            problems.append(_KeyError(key, problem, where=place, got=got, expected=_expected(key), hint=hint))
            return
        yield Setting(key=key, value=value, where=place)


def _construct(node: yaml.Node, kind: Any) -> Any:
    """Return the value of a node; where a text is wanted, ``off``, ``yes`` and ``3`` stay what was written."""
    loader = yaml.SafeLoader("")
    try:
        value = loader.construct_document(node)
    finally:
        loader.dispose()
    wants_text = kind is str or typing.get_origin(kind) is Literal or str in typing.get_args(kind)
    if isinstance(node, yaml.ScalarNode) and wants_text and value is not None:
        return node.value
    return value


def _wrong_kind(key: str, kind: Any, value: Any) -> str | None:
    """Name the mismatches that a lenient conversion would let through."""
    if section_of(kind) and (is_dataclass(kind) or value is not None):
        return f"{key} is a section, not a value"
    if isinstance(value, dict):
        return f"{key} is a value, not a section"
    if kind is bool and not isinstance(value, bool) and not _is_reference(value):
        return f"{key} has the wrong type"
    if kind is not bool and isinstance(value, bool):
        return f"{key} has the wrong type"
    return None


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _expected(key: str) -> str:
    doc = field_docs()[key]
    return spell_type(types_by_key()[key]) + (f" ({doc})" if doc else "")


def _suggest(key: str) -> str:
    """Say what was probably meant: a sibling of similar name, else the same name in another section."""
    known = list(types_by_key())
    section, _, name = key.rpartition(".")
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        return f"did you mean {section + '.' if section else ''}{close[0]}?"
    elsewhere = [k for k in known if k.rpartition(".")[2] == name] or difflib.get_close_matches(key, known, n=1)
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere[:3])}?"
    return f"keys here are {', '.join(siblings)}" if siblings else "remove it"


def _writable(node: DictConfig) -> DictConfig:
    """Lift the read-only mark that frozen dataclasses give, all the way down."""
    OmegaConf.set_readonly(node, False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            _writable(child)
    return node


def _apply(tree: DictConfig, settings: Sequence[Setting], problems: list[ConfigError]) -> None:
    for setting in settings:
        section, _, name = setting.key.rpartition(".")
        if name == "kind" and types_by_key().get(section) is ScheduleConfig:
            OmegaConf.update(tree, section, _writable(OmegaConf.structured(ScheduleConfig)), merge=False)
    for setting in settings:
        names = setting.key.split(".")
        for section in (".".join(names[:depth]) for depth in range(1, len(names))):
            if OmegaConf.select(tree, section) is None and (kind := section_of(types_by_key()[section])):
                OmegaConf.update(tree, section, _writable(OmegaConf.structured(kind)), merge=False)
        try:
            OmegaConf.update(tree, setting.key, setting.value, merge=False)
        except OmegaConfBaseException:
            got = "nothing" if setting.value is None else setting.value
            what = f"{setting.key} has the wrong type"
            if re.match("one of", spell_type(types_by_key()[setting.key])):
                what = f"{setting.key} has an unknown value"
            problems.append(_KeyError(setting.key, what, where=setting.where, got=got, expected=_expected(setting.key)))


def _add_missing(tree: DictConfig, problems: list[ConfigError], places: dict[str, str], path: str) -> None:
    broken = {p.key for p in problems if isinstance(p, _KeyError)}
    for key in [k for k in types_by_key() if k in OmegaConf.missing_keys(tree)]:
        if not any(key == b or key.startswith(f"{b}.") for b in broken):
            section = key.rpartition(".")[0]
            where = (section and _place(section, places)) or path
            problems.append(_KeyError(key, f"{key} is missing", where=where, expected=_expected(key)))
        OmegaConf.update(tree, key, _PLACEHOLDERS.get(key, 0.0))


def _resolve(tree: DictConfig, problems: list[ConfigError], places: dict[str, str], path: str) -> None:
    """Replace every ``${…}`` by its value, one problem for each that cannot be."""
    for key, kind in types_by_key().items():
        section = key.rpartition(".")[0]
        if section_of(kind) or (section and OmegaConf.select(tree, section) is None):
            continue
        try:
            OmegaConf.update(tree, key, OmegaConf.select(tree, key), merge=False)
        except OmegaConfBaseException as error:
            got = str(error).splitlines()[0]
            problems.append(_KeyError(key, f"{key} cannot be resolved", where=places.get(key, path), got=got))
            default = OmegaConf.select(OmegaConf.structured(RunConfig), key)
            OmegaConf.update(tree, key, _PLACEHOLDERS.get(key, default), merge=False)
