"""Recorders and the registry, as a scraper reads them."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from structlog.testing import capture_logs

from dra.telemetry.metrics import Counter, Family, Gauge, Histogram, Registry, render, samples_of

COUNTED = Family("dra_things_total", "counter", "Things that happened.", ("what",))
LEVEL = Family("dra_level_ratio", "gauge", "How full it is.", ("where",))
TIMES = Family("dra_wait_seconds", "histogram", "How long it took.", ("what",), buckets=(0.1, 1.0))


def text_of(*collectors) -> list[str]:
    registry = Registry()
    registry.add(*collectors)
    body, content_type = render(registry.collect())
    assert content_type.startswith("text/plain")
    return body.decode().splitlines()


def test_a_counter_counts_by_label_and_starts_at_zero_where_asked():
    counter = Counter(COUNTED)
    counter.add("a", by=0)
    counter.add("b")
    counter.add("b", by=2)
    assert text_of(counter) == [
        "# HELP dra_things_total Things that happened.",
        "# TYPE dra_things_total counter",
        'dra_things_total{what="a"} 0.0',
        'dra_things_total{what="b"} 3.0',
    ]


def test_a_gauge_is_set_moved_and_taken_away():
    gauge = Gauge(LEVEL)
    gauge.set(0.5, "left")
    gauge.add(0.25, "left")
    gauge.set(1, "right")
    gauge.remove("right")
    assert text_of(gauge)[2:] == ['dra_level_ratio{where="left"} 0.75']


def test_a_histogram_is_cumulative_and_its_bounds_belong_to_the_bucket_below():
    histogram = Histogram(TIMES)
    for value in (0.05, 0.1, 0.5, 7):
        histogram.observe(value, "x")
    histogram.touch("y")
    assert text_of(histogram)[2:] == [
        'dra_wait_seconds_bucket{le="0.1",what="x"} 2.0',
        'dra_wait_seconds_bucket{le="1.0",what="x"} 3.0',
        'dra_wait_seconds_bucket{le="+Inf",what="x"} 4.0',
        'dra_wait_seconds_sum{what="x"} 7.65',
        'dra_wait_seconds_count{what="x"} 4.0',
        'dra_wait_seconds_bucket{le="0.1",what="y"} 0.0',
        'dra_wait_seconds_bucket{le="1.0",what="y"} 0.0',
        'dra_wait_seconds_bucket{le="+Inf",what="y"} 0.0',
        'dra_wait_seconds_sum{what="y"} 0.0',
        'dra_wait_seconds_count{what="y"} 0.0',
    ]


def test_what_is_not_known_has_no_series_and_a_family_without_series_is_not_there():
    assert text_of(lambda: [samples_of(LEVEL, [(("a",), None), (("b",), 0.0)])])[2:] == [
        'dra_level_ratio{where="b"} 0.0'
    ]
    assert text_of(lambda: [samples_of(LEVEL, [(("a",), None)])]) == []


def test_too_many_series_are_counted_together():
    counter = Counter(COUNTED, max_series=2)
    for name in ("a", "b", "c", "d", "a"):
        counter.add(name)
    assert sorted(text_of(counter)[2:]) == [
        'dra_things_total{what="a"} 2.0',
        'dra_things_total{what="b"} 1.0',
        'dra_things_total{what="other"} 2.0',
    ]


def test_wrong_labels_and_kinds_are_errors_where_they_are_written():
    with pytest.raises(ValueError, match="has the labels"):
        Counter(COUNTED).add("a", "b")
    with pytest.raises(ValueError, match="is a counter"):
        Gauge(COUNTED)


def test_two_that_give_the_same_family_are_one_family():
    first, second = Counter(COUNTED), Counter(COUNTED)
    first.add("a")
    second.add("b")
    assert text_of(first, second)[2:] == ['dra_things_total{what="a"} 1.0', 'dra_things_total{what="b"} 1.0']


def test_what_fails_costs_its_own_series_and_is_said_once():
    well = []

    def fails():
        if not well:
            raise RuntimeError("no")
        return ()

    counter = Counter(COUNTED)
    counter.add("a")
    registry = Registry()
    registry.add(fails, counter)
    with capture_logs() as logs:
        for _ in range(3):
            assert [each.family.name for each in registry.collect()] == ["dra_things_total"]
        assert [entry["event"] for entry in logs] == ["metrics_not_collected"]
        well.append(True)
        registry.collect()
        well.clear()
        registry.collect()
    assert [entry["event"] for entry in logs] == ["metrics_not_collected"] * 2


def test_openmetrics_is_given_to_who_asks_for_it():
    counter = Counter(COUNTED)
    counter.add("a")
    registry = Registry()
    registry.add(counter)
    body, content_type = render(registry.collect(), accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.decode().endswith("# EOF\n")


def test_counting_from_many_threads_loses_nothing():
    counter, histogram = Counter(COUNTED), Histogram(TIMES)

    def work():
        for _ in range(500):
            counter.add("a")
            histogram.observe(0.5, "a")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    (samples,) = histogram()
    assert counter.value("a") == samples.series[0].value.count == 2000


def test_recording_does_not_load_the_library_that_writes_out():
    code = (
        "import sys; from dra.telemetry.metrics import Counter, Family; "
        "Counter(Family('a_total', 'counter', 'A.')).add(); "
        "sys.exit('prometheus_client' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
