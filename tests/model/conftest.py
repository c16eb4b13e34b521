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
    "tests.model.route_machine",
    "tests.model.route_member",
    "tests.model.route_producer",
    "tests.model.route_truth",
)
