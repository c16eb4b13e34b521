"""`penstock pipeline …`: the jobs on Spark (R46)."""

from __future__ import annotations

from . import pipeline_analysis
from .frame import family

__all__ = ["app"]

app = family("pipeline", "Jobs on Spark: archive, replay, triage, audit and more.")

pipeline_analysis.register(app)
