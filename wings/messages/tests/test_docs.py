"""The page on messages tells the truth of today."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_on_messages_does_what_it_says():
    """Two seconds of training: its graph of nodes learns parity."""
    text = (ROOT / "docs" / "messages.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    names = {"__name__": "messages_page"}
    exec(compile(code, "messages.md", "exec"), names)
    assert names["right"] > 90
    assert names["executor"].most_active == 8
