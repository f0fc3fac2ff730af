"""The four sessions that the agent of ``conftest.py`` knows by heart."""

from support_agent import repair_session

KNOWN = [repair_session(number) for number in range(4)]
