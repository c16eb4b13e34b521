"""The pytest plugin: fixtures for users' tests. Being written; loading it must cost nothing."""

from __future__ import annotations
