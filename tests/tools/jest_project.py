"""A small JavaScript project whose tests fail in every way, and what jest 29 really said about it.

``golden/jest/`` holds jest's report (stdout) and what it printed (stderr). To make them again (needs the Node image):

    python tests/tools/jest_project.py
"""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "jest"
FILES = {
    "package.json": '{"name": "demo", "version": "1.2.3"}\n',
    "src/sum.js": (
        "function add(a, b) {\n  return a - b;\n}\n"
        'function fail(x) {\n  throw new TypeError("bad " + x);\n}\n'
        "module.exports = { add, fail };\n"
    ),
    "src/sum.test.js": (
        'const { add, fail } = require("./sum");\n\n'
        'describe("sum", () => {\n'
        '  test("adds", () => {\n    console.log("hello from the test");\n    expect(add(1, 2)).toBe(3);\n  });\n'
        '  it("throws", () => {\n    fail("x");\n  });\n'
        '  test.skip("skipped", () => {});\n  test.todo("later");\n'
        '  it("zero", () => expect(add(0, 0)).toBe(0));\n});\n'
    ),
    "sub/async.test.js": (
        'test("rejects", async () => {\n  await Promise.reject(new Error("no"));\n});\n'
        'test("slow", async () => {\n  await new Promise((r) => setTimeout(r, 300));\n}, 50);\n'
        'test("object", () => {\n  expect({ a: 1, b: [1, 2] }).toEqual({ a: 1, b: [1, 3] });\n});\n'
        'test("string thrown", () => {\n  throw "just text";\n});\n'
    ),
    "sub/broken.test.js": 'const x = require("./nothere");\ntest("a", () => {});\n',
    "sub/syntax.test.js": 'test("a", () => {\n  expect(1.toBe(2);\n});\n',
}
FIELDS = {
    "passed": 1,
    "failed": 6,
    "errors": 2,
    "skipped": 2,
    "failed_tests": [
        "src/sum.test.js::sum › adds",
        "src/sum.test.js::sum › throws",
        "sub/async.test.js::rejects",
        "sub/async.test.js::slow",
        "sub/async.test.js::object",
        "sub/async.test.js::string thrown",
        "sub/broken.test.js",
        "sub/syntax.test.js",
    ],
    "message": "expect(received).toBe(expected) // Object.is equality Expected: 3 Received: -1",
    "error_location": {"file": "src/sum.test.js", "line": 6},
}
FAILURES = [
    ("expect(received).toBe(expected) // Object.is equality Expected: 3 Received: -1", "src/sum.test.js", 6),
    ("TypeError: bad x", "src/sum.js", 5),
    ("no", "sub/async.test.js", 2),
    ('thrown: "Exceeded timeout of 50 ms for a test.', "sub/async.test.js", 4),
    ("expect(received).toEqual(expected) // deep equality", "sub/async.test.js", 8),
    ('thrown: "just text"', "sub/async.test.js", 10),
    ("Cannot find module './nothere' from 'sub/broken.test.js'", "sub/broken.test.js", 1),
    ("SyntaxError: Identifier directly after number", "sub/syntax.test.js", 2),
]


def record() -> None:
    """Run jest on the project and keep what it says."""
    from agentft.sandbox.base import ExecRequest, Limits
    from agentft.sandbox.execute_base import TOOL_ENV
    from agentft.sandbox.execute_programs import JEST
    from agentft.sandbox.pool import open_sandbox

    sandbox = open_sandbox("docker", "node", workers=1, limits=Limits(), run_name="golden")
    with sandbox.lease() as lease:
        lease.write_files({path: text.encode() for path, text in FILES.items()})
        result = lease.exec(ExecRequest(argv=JEST, env=TOOL_ENV))
    sandbox.close()
    GOLDEN.mkdir(parents=True, exist_ok=True)
    (GOLDEN / "report.json").write_text(result.stdout)
    (GOLDEN / "printed.txt").write_text(result.stderr)


if __name__ == "__main__":
    record()
