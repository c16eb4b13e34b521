"""How often the source cites each invariant (I1 …) and each requirement (R1 …).

Errors, help and logs cite none (`tests/docs/test_ids.py`), so all of the text is counted. A citation tells
which promise a line keeps, and code that moves takes it along: a count may grow, and only falls where the
line itself went.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

__all__ = ["SOURCE", "citations", "fallen"]

SOURCE = Path(__file__).resolve().parents[2] / "src"
_ID = re.compile(r"(?<![\w.-])[IR][1-9]\d?(?![\w])")


def citations(source: Path = SOURCE) -> dict[str, int]:
    found = Counter(
        id
        for path in source.rglob("*")
        if path.suffix in (".py", ".java")
        for id in _ID.findall(path.read_text(encoding="utf-8"))
    )
    return {id: found[id] for id in sorted(found, key=lambda one: (one[0], int(one[1:])))}


def fallen(pinned: dict[str, int], found: dict[str, int]) -> list[str]:
    return [
        f"{id}: cited {before} times, now {found.get(id, 0)}"
        for id, before in pinned.items()
        if found.get(id, 0) < before
    ]
