"""The machines and their models are no test modules; their assertions should explain themselves too."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "tests.model.delivery_machine",
    "tests.model.naive_progress",
    "tests.model.ordered_ledger",
    "tests.model.ordered_machine",
    "tests.model.ordered_member",
    "tests.model.ordered_rules",
)
