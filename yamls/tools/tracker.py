"""The example tool `tracker`: runs inside the session's container, where 127.0.0.1:8000 is the service."""

import json
import sys
import urllib.error
import urllib.request


def request(path, method="GET", body=None):
    """Send one request; return the answer and, as the last line, its status. A refusal fails the tool."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:8000{path}", data=data, method=method.upper())
    try:
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return f"{answer.read().decode()}\n{json.dumps({'http_status': answer.status})}"
    except urllib.error.HTTPError as error:
        print(json.dumps({"http_status": error.code}))
        sys.exit(f"{method.upper()} {path}: {error.code}: {json.load(error)['error']}")
