"""A split plan as a file: JSON, with a version of its form, so that people can read it and change it.

Decides whether a text is a plan. Must never take one that is only nearly right: what it says is done to a
live topic.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import msgspec

from ..errors import InvalidSetting
from .topology.split_plan import SplitPlan

__all__ = ["FORM", "plan_from_text", "plan_to_text"]

FORM = 1
_MARK = "postroom_split_plan"


def plan_to_text(plan: SplitPlan) -> str:
    """A line for each step and each partition."""
    fields: dict[str, Any] = {_MARK: FORM, **asdict(plan)}
    lines = []
    for name, value in fields.items():
        if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
            listed = ",\n".join(f"    {json.dumps(one)}" for one in value)
            lines.append(f'  "{name}": [\n{listed}\n  ]')
        else:
            lines.append(f'  "{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def plan_from_text(text: str | bytes) -> SplitPlan:
    """InvalidSetting if it is no plan, or one of a later form."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidSetting(f"that is no split plan, not even JSON: {error}") from None
    if not isinstance(found, dict) or _MARK not in found:
        raise InvalidSetting(
            f"that is no split plan: it has no {_MARK!r}; `postroom pipeline hotspots` makes one"
        )
    form = found.pop(_MARK)
    if form != FORM:
        raise InvalidSetting(
            f"the split plan has form {form!r}, and this version of Postroom reads form {FORM}: use the "
            "version that has made it, or make a new plan"
        )
    unknown = sorted(set(found) - set(SplitPlan.__dataclass_fields__))
    if unknown:
        raise InvalidSetting(f"the split plan has what is not known here: {', '.join(unknown)}")
    try:
        return msgspec.convert(found, SplitPlan)
    except msgspec.ValidationError as error:
        raise InvalidSetting(f"the split plan is damaged: {error}") from None
