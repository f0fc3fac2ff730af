"""The tools that read and change files (floor 2), with errors that say what would have worked."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from agentft.sandbox.base import ExecResult, Lease
from agentft.sandbox.execute_base import EXIT_FAILED, message, operand, run_program
from agentft.tools.dockerfile import check_dockerfile

SKIPPED_FOLDERS = (".git", "__pycache__", "node_modules")
MOST_COMPARED_LINES = 5000


def file_read(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    """Return the lines as ``number: text``."""
    path = args["path"]
    data = _read(lease, path)
    if isinstance(data, ExecResult):
        return data
    if b"\0" in data:
        return message(EXIT_FAILED, stderr=f"{path}: is a binary file")
    lines = _lines(data.decode("utf-8", "replace"))
    first, last = args.get("start_line", 1), min(args.get("end_line", len(lines)), len(lines))
    if first < 1 or (lines and first > len(lines)) or (last < first and lines):
        asked = f"lines {first} to {args.get('end_line', 'the end')}"
        return message(EXIT_FAILED, stderr=f"{path}: has {len(lines)} lines; cannot show {asked}")
    shown = "".join(f"{number}: {lines[number - 1]}\n" for number in range(first, last + 1))
    return message(0, stdout=shown, start_line=first, total_lines=len(lines))


def file_write(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    """Create or replace the file, and the folders above it."""
    lease.write_files({args["path"]: args["content"].encode()})
    total = len(_lines(args["content"]))
    return message(0, stdout=f"{args['path']}: wrote {total} lines\n", total_lines=total)


def file_edit(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    """Replace the one place where ``old`` stands."""
    path, old, new, line = args["path"], args["old"], args["new"], args.get("line")
    data = _read(lease, path)
    if isinstance(data, ExecResult):
        return data
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return message(EXIT_FAILED, stderr=f"{path}: is not UTF-8 text")
    if not old or old == new:
        return message(EXIT_FAILED, stderr=f"{path}: `old` is {'empty' if not old else 'the same as `new`'}")
    places = _occurrences(text, old)
    wanted = [(start, at) for start, at in places if line is None or at == line]
    if len(wanted) != 1:
        why = _ambiguous(places, wanted, line) if places else f"`old` does not occur{_nearest(text, old)}"
        return message(EXIT_FAILED, stderr=f"{path}: {why}")
    start, at = wanted[0]
    lease.write_files({path: (text[:start] + new + text[start + len(old) :]).encode()})
    return message(0, stdout=f"{path}: edited at line {at}\n", start_line=at)


def file_list(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    """Return the files under a folder, sorted, without what is generated."""
    result = _find(lease, args.get("path"))
    files = _found(result)
    stdout = "".join(f"{name}\n" for name in files) or ("no files\n" if result.exit_code == 0 else "")
    return dataclasses.replace(result, stdout=stdout, fields={"files": len(files)})


def code_search(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    """Return ``path:line:text`` of every line that matches, sorted."""
    skipped = [f"--exclude-dir={name}" for name in SKIPPED_FOLDERS]
    path = args.get("path")
    result = run_program(lease, ("grep", "-nHEIrZ", *skipped, "-e", args["pattern"], "--", operand(path)))
    hits = []
    for row in result.stdout.splitlines():
        name, _, rest = row.partition("\0")
        number, _, text = rest.partition(":")
        if number.isdigit():
            hits.append((name.removeprefix("./"), int(number), text))
    stdout = "".join(f"{name}:{number}:{text}\n" for name, number, text in sorted(hits))
    stderr = result.stderr
    if result.exit_code == 1:
        stderr = f"no line matches {args['pattern']}{f' in {path}' if path else ''}\n"
    return dataclasses.replace(result, stdout=stdout, stderr=stderr, fields={"matches": len(hits)})


def docker_build(lease: Lease, args: Mapping[str, Any]) -> ExecResult:
    """Check the Dockerfile and what it copies; nothing is built."""
    data = _read(lease, "Dockerfile")
    if isinstance(data, ExecResult):
        return data
    files = set(_found(_find(lease, None)))
    known = files | {parent.as_posix() for file in files for parent in PurePosixPath(file).parents}

    def exists(path: str) -> bool:
        clean = PurePosixPath(path).as_posix()
        return clean in known or any(PurePosixPath(name).match(clean) for name in known)

    check = check_dockerfile(data.decode("utf-8", "replace"), exists)
    fields: dict[str, Any] = {
        "stages": len(check.stages),
        "instructions": check.instructions,
        "problems": len(check.problems),
    }
    if check.problems:
        line, text = check.problems[0]
        fields |= {"message": text, "error_location": {"file": "Dockerfile", "line": line}}
        return message(
            EXIT_FAILED, stderr="\n".join(f"Dockerfile:{at}: {what}" for at, what in check.problems), **fields
        )
    what = f"{check.instructions} instructions, {len(check.stages)} {'stage' if len(check.stages) == 1 else 'stages'}"
    return message(
        0, stdout=f"Dockerfile: no problem found in {what}; {args['tag']} was not built, RUN was not run\n", **fields
    )


def _read(lease: Lease, path: str) -> bytes | ExecResult:
    """Return the file's content; where there is no such file, the result that says which ones are like it."""
    try:
        return lease.read_file(path)
    except FileNotFoundError as error:
        name = PurePosixPath(path).name
        files = {file: PurePosixPath(file).name for file in _found(_find(lease, None))}
        same = [file for file, other in files.items() if other == name]
        close = difflib.get_close_matches(name, sorted(set(files.values())), n=1)
        like = same or [file for file, other in files.items() if other in close]
        hint = f"; did you mean {' or '.join(like[:3])}?" if like else "; file_list shows what is there"
        return message(EXIT_FAILED, stderr=f"{path}: {error.strerror or 'No such file or directory'}{hint}")


def _find(lease: Lease, path: str | None) -> ExecResult:
    skipped = [word for name in SKIPPED_FOLDERS for word in ("-name", name, "-o")][:-1]
    return run_program(lease, ("find", operand(path), "(", *skipped, ")", "-prune", "-o", "-type", "f", "-print"))


def _found(result: ExecResult) -> list[str]:
    return sorted(line.removeprefix("./") for line in result.stdout.splitlines())


def _lines(text: str) -> list[str]:
    """Return the lines as an editor and Python's parser count them (not at form feeds, as ``splitlines`` does)."""
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def _occurrences(text: str, old: str) -> list[tuple[int, int]]:
    """Return (offset, line from 1) of every place where ``old`` starts, overlapping ones included."""
    places, start, line, counted = [], text.find(old), 1, 0
    while start >= 0:
        line, counted = line + text.count("\n", counted, start), start
        places.append((start, line))
        start = text.find(old, start + 1)
    return places


def _ambiguous(places: list[tuple[int, int]], wanted: list[tuple[int, int]], line: int | None) -> str:
    lines = [at for _, at in places]
    shown = ", ".join(map(str, lines[:10])) + (", …" if len(lines) > 10 else "")
    if line is None:
        return f"`old` occurs {len(lines)} times, starting on lines {shown}; give `line`, or more of the text"
    if wanted:
        return f"`old` occurs {len(wanted)} times starting on line {line}; give more of the text"
    return f"`old` does not start on line {line}; it starts on {'line' if len(lines) == 1 else 'lines'} {shown}"


def _nearest(text: str, old: str) -> str:
    """Name the line that is most like the first line of ``old``."""
    first = next((line.strip() for line in old.splitlines() if line.strip()), "")
    lines = [line.strip() for line in _lines(text)[:MOST_COMPARED_LINES]]
    close = difflib.get_close_matches(first, lines, n=1, cutoff=0.6)
    if not close:
        return "; file_read shows what is there"
    number = lines.index(close[0]) + 1
    if close[0] == first and "\n" not in old.strip("\n"):
        return f"; line {number} has the same text with other white space"
    return f"; the most similar line is {number}: {close[0][:120]}"
