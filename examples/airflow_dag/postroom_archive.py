"""Airflow: archive a topic every hour, then audit it; merge the archive's small files every night.

A retry is safe at any point. Each run goes on from the last commit of the table and writes every message
exactly once, and an audit only reads. For Airflow 3 with `apache-airflow-providers-standard`. Postroom has an
environment of its own on the worker (`POSTROOM_BIN`), since Airflow's packages are pinned.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

TOPIC, LAKE = "orders", "/data/lake"
POSTROOM = "${POSTROOM_BIN:-postroom} pipeline"
SAFE = {"retries": 3, "retry_delay": timedelta(minutes=2), "retry_exponential_backoff": True}

with DAG(
    "postroom_archive",
    schedule="5 * * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,  # a run archives all that is there: there is nothing to make up for
    max_active_runs=1,  # a table has one writer
    default_args=SAFE,
    tags=["postroom"],
):
    # POSTROOM_URL and POSTROOM_TOKEN come from the worker's environment
    archive = BashOperator(task_id="archive", bash_command=f"{POSTROOM} archive {TOPIC} --to {LAKE}")
    audit = BashOperator(
        task_id="audit",
        bash_command=f"{POSTROOM} audit {TOPIC} --number header:seq --since 2h --report {LAKE}/audit.jsonl",
    )
    archive >> audit

with DAG(
    "postroom_compact",
    schedule="15 3 * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    default_args=SAFE,
    tags=["postroom"],
):
    BashOperator(task_id="compact", bash_command=f"{POSTROOM} archive {TOPIC} --to {LAKE} --compact")
