"""Metrics as values and as text: what is written can be read by Prometheus' own parser."""

from __future__ import annotations

import json
import math

from prometheus_client.parser import text_string_to_metric_families

from postroom.metrics import Metrics, counter, gauge, histogram, single

NAMES = ("topic", "group")
FOUND = Metrics(
    [
        counter("sent", "Messages\nsent.", ("topic",), [(('a "b"\\\n',), 3), (("c",), 4)]),
        gauge("behind", "Behind.", NAMES, [(("c", "g"), 2.5)], of_queue=True),
        histogram("wait_seconds", "Waits.", NAMES, [(("c", "g"), [1, 0, 2], 7.5)], (0.1, 1.0)),
        single("age_seconds", "Age.", math.inf),
    ]
)


def test_prometheus_reads_what_is_written() -> None:
    read = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(FOUND.text)
        for sample in family.samples
    }
    wrote = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in FOUND.families
        for sample in family.samples
    }
    assert read == wrote and len(read) == 9
    kinds = {family.name: family.type for family in text_string_to_metric_families(FOUND.text)}
    assert kinds == {family.name: family.type for family in FOUND.families}


def test_buckets_add_up() -> None:
    buckets = [sample.value for sample in FOUND.families[2].samples if sample.name.endswith("_bucket")]
    assert buckets == [1, 1, 3]
    assert FOUND.value("postroom_wait_seconds_count", topic="c", group="g") == 3
    assert FOUND.value("postroom_wait_seconds_sum") == 7.5


def test_a_value_is_found_by_name_and_labels() -> None:
    assert FOUND.value("postroom_sent", topic="c") == 4 == FOUND.value("postroom_sent_total", topic="c")
    assert FOUND.value("postroom_sent") == 7
    assert FOUND.value("postroom_behind", topic="other") is None is FOUND.value("postroom_nothing")


def test_another_process_gets_the_same() -> None:
    again = Metrics.of_json(json.loads(json.dumps(FOUND.as_json())))
    assert again.families == FOUND.families and again.text == FOUND.text


def test_a_label_is_added_to_every_sample() -> None:
    labelled = FOUND.families[2].with_label("process", "2")
    assert labelled.labels == (*NAMES, "process")
    assert all(sample.labels["process"] == "2" for sample in labelled.samples)
    assert 'group="g",le="0.1",process="2",topic="c"' in Metrics([labelled]).text
