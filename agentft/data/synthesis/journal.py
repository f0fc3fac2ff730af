"""What was already worked out (floor 3): an append-only file beside the output, so that a killed synthesis goes on.

The first line names the request; a journal of another request is started anew. A torn last line is left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any


class Journal:
    """Answers by key, on disk. Not for use by several threads at once."""

    def __init__(self, path: Path, request: str) -> None:
        """Open or start the journal of ``request`` (a hash)."""
        self.path = path
        self._known: dict[str, Any] = {}
        whole = self._load(request)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream: IO[bytes] = path.open("r+b" if whole else "wb")
        self._stream.truncate(whole)
        self._stream.seek(whole)
        if not whole:
            self._append({"request": request})

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> Any:
        """Return the answer kept for ``key``; None if there is none."""
        return self._known.get(key)

    def put(self, key: str, answer: Any) -> None:
        """Keep an answer (JSON); it is on its way to the disk when this returns."""
        if key not in self._known:
            self._known[key] = answer
            self._append({"key": key, "answer": answer})

    def close(self, *, remove: bool = False) -> None:
        """Close the file, and remove it where the work is complete."""
        self._stream.close()
        if remove:
            self.path.unlink(missing_ok=True)

    def _load(self, request: str) -> int:
        """Read what is there; return how many bytes of it are whole lines of this request."""
        if not self.path.is_file():
            return 0
        whole = 0
        for raw in self.path.read_bytes().splitlines(keepends=True):
            try:
                line = json.loads(raw) if raw.endswith(b"\n") else None
            except ValueError:
                line = None
            if not isinstance(line, dict) or (whole == 0 and line.get("request") != request):
                break
            whole += len(raw)
            if "key" in line:
                self._known[line["key"]] = line["answer"]
        return whole

    def _append(self, line: dict[str, Any]) -> None:
        self._stream.write(json.dumps(line).encode() + b"\n")
        self._stream.flush()
