"""The runbooks as the console has them: the sections of their page, in a script that the page loads.

    python -m tools.docs.runbooks           # write src/postroom/console/static/runbooks.js
    python -m tools.docs.runbooks --check   # exit code 1 if it is out of date

The page is the one source: it is what alerts link, and what people edit. The console works without a network,
so it carries the text; as plain lines, since the console makes no HTML of any text.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

__all__ = ["PAGE", "SCRIPT", "sections", "text"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "runbooks.md"
SCRIPT = ROOT / "src" / "postroom" / "console" / "static" / "runbooks.js"


def sections() -> dict[str, list[str]]:
    """Return the lines of each section, by the name of its alert; the first says what is wrong."""
    found: dict[str, list[str]] = {}
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        name, *lines = part.strip().split("\n")
        found[name] = [re.sub(r"^\d+\. ", "", line).replace("`", "") for line in lines]
    return found


def text() -> str:
    """Return the script."""
    return (
        "// What to do about an alert. Written by tools/docs/runbooks.py from docs/howto/runbooks.md.\n\n"
        f"export const RUNBOOKS = {json.dumps(sections(), indent=1, ensure_ascii=False)};\n"
    )


def main(arguments: list[str]) -> int:
    if "--check" not in arguments:
        SCRIPT.write_text(text(), encoding="utf-8")
        return 0
    if SCRIPT.read_text(encoding="utf-8") == text():
        return 0
    print(f"{SCRIPT.name} is out of date: python -m tools.docs.runbooks", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
