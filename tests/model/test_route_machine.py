"""Routes that change under producers and ordered groups, through the store, on SQLite."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.model.examples import examples
from tests.model.route_machine import RouteMachine

TestRouteMachine = pytest.mark.timeout(120)(RouteMachine.TestCase)
TestRouteMachine.settings = settings(max_examples=examples(110), stateful_step_count=50, deadline=None)
