"""The machine and its model are no test modules; their assertions should explain themselves all the same."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.model.delivery_machine", "tests.model.naive_progress")
