"""Answers one SQL query on /srv/shop.db: {"query": …} as JSON on stdin → a table on stdout, and a last line of fields.

Reading only: the file is opened as immutable, and an authorizer lets nothing through but SELECT. A query ends after
STATEMENT_S; at most ROWS rows are shown. Errors name what there is.
"""

import difflib
import json
import re
import sqlite3
import sys
import time

ROWS, CELL, STATEMENT_S = 50, 200, 2.0
ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)


def main() -> int:
    """Answer the query; 0, or 1 with the reason on stderr."""
    query = json.load(sys.stdin)["query"]
    database = sqlite3.connect("file:/srv/shop.db?mode=ro&immutable=1", uri=True)
    tables = {name: columns(database, name) for (name,) in database.execute("SELECT name FROM sqlite_master")}
    database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY)
    end = time.monotonic() + STATEMENT_S
    database.set_progress_handler(lambda: time.monotonic() > end, 1000)
    try:
        cursor = database.execute(query)
        rows = cursor.fetchmany(ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning) as error:
        print(explain(str(error), tables), file=sys.stderr)
        return 1
    names = [column[0] for column in cursor.description or ()]
    print(" | ".join(names))
    for row in rows[:ROWS]:
        print(" | ".join("NULL" if cell is None else str(cell)[:CELL] for cell in row))
    if len(rows) > ROWS:
        print(f"... more than {ROWS} rows: ask for fewer, or for sums")
    print(json.dumps({"rows": min(len(rows), ROWS), "columns": names, "more": len(rows) > ROWS}))
    return 0


def columns(database: sqlite3.Connection, table: str) -> list[str]:
    """Return the columns of a table."""
    return [row[1] for row in database.execute(f"PRAGMA table_info({table})")]


def explain(error: str, tables: dict[str, list[str]]) -> str:
    """Return the error with what would have worked."""
    if error == "interrupted":
        return f"stopped after {STATEMENT_S:.0f} s: ask for less"
    if error in ("not authorized", "authorization denied") or error.startswith("access to"):
        return "only SELECT is allowed: the database cannot be changed"
    missing = re.fullmatch(r"no such (table|column): (?:\w+\.)?(\w+)", error)
    if missing is None:
        return error
    known = list(tables) if missing[1] == "table" else sorted({name for names in tables.values() for name in names})
    close = difflib.get_close_matches(missing[2], known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{error}; {hint}Tables: " + "; ".join(f"{name} ({', '.join(of)})" for name, of in tables.items())


if __name__ == "__main__":
    sys.exit(main())
