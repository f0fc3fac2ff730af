"""What the agent does in one session (floor 3), decided from what it can see; nothing runs here.

The agent's policy, each choice by what is visible: a request that shows where the fault is (a trace, a file, the
cursor, the exact text) is followed there directly; one that names only a test is run first; a trace that ends in the
package is read there (and a search for the function called there follows where what is shown is right), one that ends
in the test is followed by a search for the function it names; both definitions are read where a search finds two; a
read that stops before the fault is read on; what is shown and wrong is edited; an edit is followed by a run (or first
by a second look, where the user asked for one); a failing run after an edit is followed by the next edit.

``plan_session`` plans one opening where the case allows it, and adds mistakes and wishes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentft.data.synthesis.case import Case, Window, window_around
from agentft.data.synthesis.defects import Defect, is_sound
from agentft.data.synthesis.source import FileEdit, Source, apply_edit, edit_between, edit_from_to, source_of
from agentft.etai import IdeContext
from agentft.sandbox.base import ExecResult

MAX_STEPS = 8
"""Enough for a wrong edit after every opening: where only some have room for one, the opening tells the outcome."""
WEIGHTS: Mapping[str, float] = {
    "run": 8.0,
    "confirm": 6.0,
    "undo": 3.0,
    "paste": 3.0,
    "where": 3.0,
    "named": 0.7,
    "cursor": 0.7,
    "exact": 0.4,
    "test": 3.0,
    "caller": 4.0,
}
"""How often each opening is tried first; a case that does not allow it goes on to the next."""

MISTAKE_SHARE = 0.45
"""How often a first wrong edit is tried, the same after every opening but ``exact``, where the user gives the edit."""
EASY = frozenset({"named", "cursor", "exact"})
"""Openings that nearly every case allows: left to themselves, they would be half of all."""
EASY_SHARE = 0.75
ELSEWHERE_SHARE = 0.35
NO_RUN_SHARE: Mapping[str, float] = {"exact": 0.45, "named": 0.12, "cursor": 0.12}
RECHECK_SHARE = 0.25
ENDING_SHARE = 0.4


@dataclass(frozen=True)
class Action:
    """One planned step: the call, what must come out of it, and which kind of thought goes with it."""

    tool: str
    args: Mapping[str, Any]
    thought: str
    facts: Mapping[str, object] = field(default_factory=dict)
    exit_code: int = 0
    mistake: bool = False
    must_show: int | None = None


@dataclass(frozen=True)
class Plan:
    """A whole session before it is executed. ``files`` is the workspace before the first step."""

    opening: str
    files: Mapping[str, str]
    actions: tuple[Action, ...]
    wishes: tuple[str, ...]
    facts: Mapping[str, object]

    @property
    def verified(self) -> bool:
        """Whether the last word is a test run."""
        return self.actions[-1].tool == "pytest_run"


def plan_session(
    case: Case, ide: IdeContext | None, probe: Callable[[], ExecResult], rng: random.Random, first: str
) -> Plan | None:
    """Return a plan with opening ``first``, or None where the case does not allow it.

    Args:
        ide: the editor's state with the cursor near the fault, for the opening ``cursor``.
        probe: runs the failing test on the broken workspace and returns the result (asked for only if needed).
    """
    opened = _OPENINGS[first](case, ide, probe, rng)
    if opened is None:
        return None
    located, extra_facts, files = opened
    room = MAX_STEPS - len(located) - 2
    if room < 0:
        return None
    wishes: list[str] = ["confirm"] if first == "confirm" else []
    if rng.random() < NO_RUN_SHARE.get(first, 0.0):
        actions = [*located, _edit(case, case.defect.repair, "exact" if first == "exact" else _edit_thought(case))]
        return Plan(first, files, tuple(actions), (*wishes, "norun"), extra_facts)
    windows = [
        Window(a.args["path"], a.args["start_line"], a.args["end_line"]) for a in located if a.tool == "file_read"
    ]
    middle = _edits(case, windows, room, rng, first)
    room -= len(middle) - 2
    phases = sum(action.tool == "pytest_run" for action in middle)
    if room >= phases and rng.random() < RECHECK_SHARE:
        middle = list(_with_second_looks(case, middle))
        room -= phases
        wishes.append("recheck")
    ending: list[Action] = []
    if room >= 1 and rng.random() < ENDING_SHARE:
        wish = rng.choice(("neighbour", "whole"))
        if wish == "neighbour" and case.neighbour and first != "confirm":
            ending = [_run(case.neighbour, "neighbour", 0)]
        elif wish == "whole" and case.profile.runs_whole(case.test_file):
            ending = [_run(case.test_file, "whole", 0)]
        wishes += [wish] if ending else []
    return Plan(first, files, (*located, *middle, *ending), tuple(wishes), extra_facts)


Opened = tuple[list[Action], dict[str, object], Mapping[str, str]] | None
Probe = Callable[[], ExecResult]


def _open_run(case: Case, ide: IdeContext | None, probe: Probe, rng: random.Random) -> Opened:
    route = _route_after_failure(case, probe())
    return None if route is None else ([_run(case.test, "run", 1), *route], {}, case.files)


def _open_confirm(case: Case, ide: IdeContext | None, probe: Probe, rng: random.Random) -> Opened:
    route = _route_after_failure(case, probe()) if case.neighbour else None
    if route is None or case.neighbour is None:
        return None
    return [_run(case.neighbour, "confirm", 0), _run(case.test, "run_failing", 1), *route], {}, case.files


def _open_paste(case: Case, ide: IdeContext | None, probe: Probe, rng: random.Random) -> Opened:
    result = probe()
    route = _read_location(case, result)
    return None if route is None else (route, {"trace": trace_text(result.stdout)}, case.files)


def _open_where(case: Case, ide: IdeContext | None, probe: Probe, rng: random.Random) -> Opened:
    route = _search_route(case, "search")
    return None if route is None else (route, {}, case.files)


def _open_named(case: Case, ide: IdeContext | None, probe: Probe, rng: random.Random) -> Opened:
    if not case.shown(case.around_def):
        return None
    return _reads(case, case.around_def, "read_named"), {}, case.files


def _open_cursor(case: Case, ide: IdeContext | None, probe: Probe, rng: random.Random) -> Opened:
    cursor = ide.cursor_position if ide is not None else None
    if cursor is None or not case.function.first_line <= cursor.line <= case.function.end_line:
        return None
    window = window_around(case.broken, cursor.line)
    return (_reads(case, [window], "read_cursor", cursor.line), {}, case.files) if case.shown([window]) else None


def _open_exact(case: Case, ide: IdeContext | None, probe: Probe, rng: random.Random) -> Opened:
    repair = case.defect.repair
    if "\n" in repair.old + repair.new or len(repair.old + repair.new) > 60:
        return None
    return [], {"old": repair.old, "new": repair.new, "line": repair.line}, case.files


def _open_undo(case: Case, ide: IdeContext | None, probe: Probe, rng: random.Random) -> Opened:
    route = _route_after_failure(case, probe())
    around = window_around(case.broken, case.line, 40)
    attempts = case.wrong_nearby([around]) if route is not None else []
    attempt = _pick(attempts, rng, lambda other: len(other.repair.old + other.repair.new) <= 60)
    if route is None or attempt is None:
        return None
    back = attempt.repair
    facts = {"old": back.old, "new": back.new, "line": back.line}
    first = Action("file_edit", back.args(), "undo", facts)
    files = {**case.files, case.defect.path: attempt.broken.text}
    return [first, _run(case.test, "run_undone", 1), *route], facts, files


def _open_test(case: Case, ide: IdeContext | None, probe: Probe, rng: random.Random) -> Opened:
    window, route = case.test_window, _search_route(case, "search")
    if window is None or route is None or not _names(case.name, _text_of(case, window)):
        return None
    return [*_reads(case, [window], "read_test"), *route], {}, case.files


def _open_caller(case: Case, ide: IdeContext | None, probe: Probe, rng: random.Random) -> Opened:
    route = _search_route(case, "search_callee")
    if case.caller is None or route is None:
        return None
    function, window = case.caller
    facts: dict[str, object] = {"caller": function.name, "file": function.path}
    read = Action("file_read", _window_args(window), "read_caller", facts)
    return [read, *route], facts, case.files


_OPENINGS: Mapping[str, Callable[[Case, IdeContext | None, Probe, random.Random], Opened]] = {
    "run": _open_run,
    "confirm": _open_confirm,
    "paste": _open_paste,
    "where": _open_where,
    "named": _open_named,
    "cursor": _open_cursor,
    "exact": _open_exact,
    "undo": _open_undo,
    "test": _open_test,
    "caller": _open_caller,
}


def trace_text(stdout: str) -> str:
    """Return the frames and the error of the first failure, as a user would paste them (at most ten lines)."""
    lines = stdout.split("\n")
    start = next((row + 1 for row, line in enumerate(lines) if re.match(r"_{3,} .+ _{3,}$", line)), 0)
    end = next((row for row in range(start, len(lines)) if re.match(r"(_{3,}|={3,}) ", lines[row])), len(lines))
    return "\n".join(line.rstrip() for line in lines[start:end][-10:] if line.strip())


def _route_after_failure(case: Case, result: ExecResult) -> list[Action] | None:
    if result.exit_code != 1:
        return None
    location = result.fields.get("error_location")
    if isinstance(location, Mapping) and location["file"] != case.test_file:
        return _read_location(case, result)
    visible = f"{result.stdout}\n{case.test}"
    return _search_route(case, "search") if _names(case.name, visible) else None


def _read_location(case: Case, result: ExecResult) -> list[Action] | None:
    """Read where the trace ends; where that is not the broken place but calls the broken function, go on to that."""
    location = result.fields.get("error_location")
    if result.exit_code != 1 or not isinstance(location, Mapping) or location["file"] not in case.package.sources:
        return None
    if location["file"] not in case.files:
        return None
    window = window_around(source_of(location["file"], case.files[location["file"]]), location["line"])
    read = _reads(case, [window], "read_location", location["line"])
    if case.shown([window]):
        return read
    route = _search_route(case, "search_callee")
    return [*read, *route] if route is not None and _names(case.name, _text_of(case, window)) else None


def _search_route(case: Case, thought: str) -> list[Action] | None:
    pattern = rf"def {case.name}\("
    hits = [
        (path, number)
        for path, text in sorted(case.files.items())
        for number, line in enumerate(text.split("\n"), start=1)
        if re.search(pattern, line)
    ]
    ours = (case.defect.path, case.function.def_line)
    if ours not in hits or len(hits) > 2 or any(path == case.test_file for path, _ in hits):
        return None
    search = Action("code_search", {"pattern": pattern}, thought, {"name": case.name})
    if len(hits) == 1:
        return [search, *_reads(case, case.around_def, "read_hit")] if case.shown(case.around_def) else None
    windows = [Window(path, line, _end(case.files[path], line)) for path, line in hits]
    return [search, *_reads(case, windows, "read_both")] if case.shown(windows) else None


def _reads(case: Case, windows: list[Window], thought: str, line: int | None = None) -> list[Action]:
    actions = []
    for number, window in enumerate(windows):
        place = line or window.start
        key = "read_on" if number and thought != "read_both" else thought
        facts = {"place": f"{window.path}:{place}", "line": place, "file": window.path, "name": case.name}
        shows = case.line if window.shows(case.defect.path, case.line) else None
        actions.append(Action("file_read", _window_args(window), key, facts, must_show=shows))
    return actions


def _edits(case: Case, windows: list[Window], room: int, rng: random.Random, opening: str) -> list[Action]:
    """Return the edits and the runs after them, with a wrong edit first where there is room for one."""
    right = _edit(case, case.defect.repair, "exact" if opening == "exact" else _edit_thought(case))
    passing = _run(case.test, "test_edit", 0, case.line)
    if room < 2 or opening == "exact" or rng.random() >= MISTAKE_SHARE:
        return [right, passing]
    elsewhere = _pick(case.wrong_nearby(windows), rng) if room >= 3 else None
    wrong = case.wrong_here(rng)
    if elsewhere is not None and (wrong is None or rng.random() < ELSEWHERE_SHARE):
        wrong = edit_between(case.broken, elsewhere.start, elsewhere.end, elsewhere.text)
        failing = _run(case.test, "test_edit", 1, wrong.line)
        back = _edit(case, elsewhere.repair, "revert")
        again = _edit(case, case.defect.repair, "after_revert")
        return [_edit(case, wrong, "mistake", mistake=True), failing, back, again, passing]
    if wrong is not None:
        failing = _run(case.test, "test_edit", 1, wrong.line)
        left = apply_edit(case.broken, wrong)
        assert left is not None
        correct = edit_from_to(Source(case.defect.path, left), case.defect.original.text)
        return [_edit(case, wrong, "mistake", mistake=True), failing, _edit(case, correct, "correct"), passing]
    return [right, passing]


def _pick(
    choices: list[Defect], rng: random.Random, wanted: Callable[[Defect], bool] = lambda _: True
) -> Defect | None:
    shuffled = rng.sample(choices, len(choices))
    return next((other for other in shuffled[:20] if wanted(other) and is_sound(other)), None)


def _with_second_looks(case: Case, actions: list[Action]) -> Iterator[Action]:
    """Put a read of the changed lines before every run."""
    for before, action in zip([None, *actions], actions, strict=False):
        if action.tool == "pytest_run" and before is not None:
            line = int(before.args["line"])
            added = str(before.args["new"]).count("\n")
            window = Window(case.defect.path, max(1, line - 3), line + added + 3)
            yield Action("file_read", _window_args(window), "recheck", {"line": line})
        yield action


def _edit(case: Case, edit: FileEdit, thought: str, mistake: bool = False) -> Action:
    facts = {"line": edit.line, "old": _short(edit.old), "new": _short(edit.new), "name": case.name, "file": edit.path}
    return Action("file_edit", edit.args(), thought, facts, mistake=mistake)


def _edit_thought(case: Case) -> str:
    if case.intent == "implement_function":
        return "implement"
    return "insert" if case.defect.inserts_lines else "edit"


def _run(targets: str, thought: str, exit_code: int, line: int = 0) -> Action:
    return Action("pytest_run", {"targets": targets}, thought, {"line": line}, exit_code)


def _window_args(window: Window) -> dict[str, Any]:
    return {"path": window.path, "start_line": window.start, "end_line": window.end}


def _text_of(case: Case, window: Window) -> str:
    return "\n".join(case.files[window.path].split("\n")[window.start - 1 : window.end])


def _end(text: str, line: int) -> int:
    return min(line + 13, text.count("\n"))


def _names(name: str, text: str) -> bool:
    """Whether ``text`` shows ``name`` as a word (or as a part of a test's name)."""
    bare = name.strip("_")
    return len(bare) >= 2 and re.search(rf"(?<![A-Za-z0-9]){re.escape(bare)}(?![A-Za-z0-9])", text) is not None


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else f"{flat[:57]}…"
