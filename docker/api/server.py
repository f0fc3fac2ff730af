"""A small issue tracker over HTTP: the service of the example tool `tracker`. State lives as long as the process.

GET /issues, GET /issues/ID, POST /issues {"title"}, POST /issues/ID/close. Every answer is a JSON object.
"""

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, LARGEST_BODY = 8000, 10_000
ISSUES = [
    {"id": 1, "title": "add() subtracts", "open": True},
    {"id": 2, "title": "the README names a file that is gone", "open": True},
]


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    def do_GET(self) -> None:
        """Show all issues, or one."""
        if self.path == "/issues":
            self.answer(200, {"issues": ISSUES})
        elif (issue := self.issue(r"/issues/(\d+)")) is not None:
            self.answer(200, issue)
        else:
            self.answer(404, {"error": f"there is no {self.path}; try /issues or /issues/1"})

    def do_POST(self) -> None:
        """Open an issue, or close one."""
        try:
            body = json.loads(self.rfile.read(min(int(self.headers.get("Content-Length") or 0), LARGEST_BODY)) or "{}")
        except ValueError:
            self.answer(400, {"error": "the body is not JSON"})
            return
        if self.path == "/issues":
            if not isinstance(body, dict) or not isinstance(body.get("title"), str):
                self.answer(400, {"error": 'an issue needs a title: {"title": "..."}'})
                return
            ISSUES.append({"id": len(ISSUES) + 1, "title": body["title"], "open": True})
            self.answer(201, ISSUES[-1])
        elif (issue := self.issue(r"/issues/(\d+)/close")) is not None:
            issue["open"] = False
            self.answer(200, issue)
        else:
            self.answer(404, {"error": f"there is no {self.path} to post to; try /issues or /issues/1/close"})

    def issue(self, pattern: str) -> dict | None:
        """Return the issue that the path names."""
        match = re.fullmatch(pattern, self.path)
        number = int(match[1]) if match else 0
        return next((issue for issue in ISSUES if issue["id"] == number), None)

    def answer(self, status: int, value: object) -> None:
        """Send a JSON object."""
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *unused: object) -> None:
        """Print nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
