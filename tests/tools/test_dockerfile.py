"""What makes a build fail before it runs anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentft.tools.dockerfile import check_dockerfile

GOOD = """\
# syntax comment
ARG VERSION=3.11
FROM python:${VERSION}-slim AS build
WORKDIR /app
COPY --chown=1:1 pkg *.toml ./
COPY ["pkg/a.py", "/app/a b.py"]
ADD https://example.invalid/x /x
RUN apt-get update \\
    # a comment inside
    && apt-get install -y git
RUN <<EOF
NOT AN INSTRUCTION
EOF
FROM build
COPY --from=0 /app /app
COPY --from=build /app /app
CMD ["python3", "-m", "pkg"]
"""


def exists(path: str) -> bool:
    return path in ("pkg", "pkg/a.py", "*.toml")


def problems(text: str) -> list[tuple[int, str]]:
    return check_dockerfile(text, exists).problems


def test_a_sound_file() -> None:
    check = check_dockerfile(GOOD, exists)
    assert check.problems == []
    assert (check.stages, check.instructions) == (["build", ""], 12)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "there is no FROM"),
        ("# only a comment\n", 1, "there is no FROM"),
        ("ARG A=1\n", 1, "there is no FROM"),
        ("\nRUN true\nFROM a\n", 2, "RUN stands before the first FROM"),
        ("FROM a\nCOPPY a b\n", 2, "unknown instruction COPPY; did you mean COPY?"),
        ("FROM a\nRUN\n", 2, "RUN needs an argument"),
        ("FROM a b\n", 1, "an image AS a name"),
        ("FROM a\nCOPY missing.txt /x\n", 2, "COPY missing.txt: no such file"),
        ("FROM a\nCOPY ../up /x\n", 2, "outside of the build context"),
        ("FROM a\nCOPY pkg\n", 2, "at least one source and a destination"),
        ("FROM a\nCOPY --from=0 a b\n", 2, "no such stage before this one"),
        ('FROM a\nCOPY ["pkg" /x]\n', 2, "COPY: "),
        ("FROM a\nRUN x \\\n  y\n\nCOPY 'pkg /x\n", 5, "No closing quotation"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, line: int, reason: str) -> None:
    found = problems(text)
    assert found[0][0] == line, found
    assert reason in found[0][1]


@given(st.text(alphabet=st.sampled_from("FROMCPYadn -=[]\"'\\\n<$./#E")))
def test_no_text_breaks_it(text: str) -> None:
    check_dockerfile(text, lambda path: True)
