"""Write docs/metrics.md from the families in dra/telemetry/families.py: `python docs/metrics_page.py`."""

from __future__ import annotations

from pathlib import Path

from dra.telemetry.families import GROUPS
from dra.telemetry.metrics import Family

PAGE = Path(__file__).parent / "metrics.md"

HEAD = """\
# Metrics

`dra plugin --http-endpoint :8080` serves them on `/metrics` (`--metrics-path`), with `/healthz` and `/readyz` beside them.
The format is Prometheus' text, or OpenMetrics where the scraper asks for it. This page is made from the code
(`make docs`).

## How they are read

* The GPUs are asked when somebody scrapes, all at once, and not more often than `--metrics-interval` (1 s): two scrapers
  share a reading. Nothing is asked while nobody scrapes, and no scrape asks the API server anything.
* A value that is not known has no series; it is never 0. So the load of a MIG device is there from Hopper on (GPM) and
  absent before, and a GPU in MIG mode has no load of its own.
* A GPU without persistence mode that nobody holds is left asleep: `dra_gpu_asleep` is 1 and its other readings are absent.
* A GPU that does not answer costs its own series; the scrape goes on after at most 5 s.

## Devices and claims

A device (a GPU or a MIG device) has one series however many claims hold it. Each prepared allocation has a
`dra_claim_device_info` series with namespace, claim, pod and request, from the moment it is prepared until it is
unprepared. Where a claim is a device's only holder, `dra_claim_*` are the device's own figures. Where several share it they
are those of the claim's own processes, found by their cgroups; that needs the host's `/proc` below `--host-root` (the manifests
mount it), and without it these series are absent. A claim for more than eight pods names none of them (`pod` is empty). `container` is empty where a
claim does not tell it.

```
# what each team uses
sum by (namespace) (dra_claim_utilization_ratio)
# everything about the GPU of a claim
dra_gpu_temperature_celsius * on (uuid) group_left (namespace, claim, pod) dra_claim_device_info
# allocated for half an hour and not used in that time
max_over_time(dra_claim_utilization_ratio[30m]) == 0
  and on (namespace, claim) (time() - dra_claim_prepared_timestamp_seconds > 1800)
```

The last column names what dcgm-exporter calls the same. Its units differ: percent where ours are ratios, MiB for bytes,
mJ for joules, MHz for hertz.
"""


def page() -> str:
    """Give the whole page."""
    parts = [HEAD]
    for title, families in GROUPS:
        parts.append(
            f"\n## {title}\n\n| name | type | labels | meaning | dcgm-exporter |\n|---|---|---|---|---|\n"
        )
        parts += [_row(family) for family in families]
    return "".join(parts)


def _row(family: Family) -> str:
    labels = ", ".join(family.labels) or "–"
    dcgm = ", ".join(f"`{name}`" for name in family.dcgm) or "–"
    return f"| `{family.name}` | {family.kind} | {labels} | {family.help} | {dcgm} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
