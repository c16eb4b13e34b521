"""A plug-in for kafka-python's tests: one that has parameters names its topics after itself, too.

Their fixture names a topic after the test, if that is a legal name of a topic, and else begins it with an
underscore. Such names are Postroom's own, so a third of the tests would end before they begin.
"""

from __future__ import annotations

import re

import pytest

__all__ = ["pytest_collection_modifyitems"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The name is what the fixture asks for; in the summary tests have the names that they always had."""
    for item in items:
        item.name = re.sub(r"[^a-zA-Z0-9._-]+", "-", item.name)
