"""docs/alerts.md, made from the tables."""

import re

from fmsupervisor.conditions import REGISTRY
from fmsupervisor.mixin.alerts import ALERTS, Alert, describe
from fmsupervisor.mixin.recording import RECORDINGS

_INTRODUCTION = """\
# Alerts, recorded series and dashboards

<!-- Made from fmsupervisor/mixin/ by the tests: RENEW_GOLDEN=1 pytest tests/prometheus/test_mixin.py -->

`packaging/prometheus/` has them ready for use, with all options at their defaults:

| file | for |
|---|---|
| `alerts.yaml`, `recording.yaml` | `rule_files` of Prometheus |
| `prometheusrule.yaml` | the same for the Prometheus operator: `kubectl apply -n NAMESPACE -f prometheusrule.yaml` |
| `dashboard-fleet.json`, `dashboard-node.json` | Grafana 10 and later: Dashboards, New, Import, or file provisioning |

They expect the scrape job `fmsupervisor`; where several clusters report to one Prometheus, its targets have the label
`cluster`. An interval of 15 s to 60 s does.

    scrape_configs:
      - job_name: fmsupervisor
        static_configs:
          - targets: [node1:9752, node2:9752]
            labels: {cluster: west}

## Options

Other labels, selectors and durations: write what differs into a TOML file and make the files anew, with any Python that
has fmsupervisor installed:

    python3 -m fmsupervisor.mixin --options mixin.toml DIRECTORY

In jsonnet: `{ prometheusAlerts+:: std.parseYaml(importstr 'alerts.yaml') }`, and the like for the others.

| key | default | meaning |
|---|---|---|
| `selector` | `job="fmsupervisor"` | label matchers of every series |
| `cluster_label`, `node_label` | `cluster`, `instance` | the names of these labels |
| `runbook_url` | `docs/runbook.md#{anchor}` | address of a condition's remedy; `{anchor}` is its place on the page |
| `alerts_url` | `docs/alerts.md#{anchor}` | the same of this page, for alerts without a condition |
| `link_sxids_per_hour` | 10 | from how many non-fatal SXids an hour on a link is worth a look |
| `omit` | `[]` | names of alerts that are left out, with the conditions that they stand for |
| `labels` | `{}` | labels added to every alert |
| `severities` | `{}` | other words for `critical` and `warning` |
| `for` | `{}` | other durations, by name of the alert |

For example:

    selector = 'job="monitoring/fmsupervisor"'
    node_label = "node"
    runbook_url = "https://wiki.example.org/fmsupervisor/runbook#{anchor}"
    omit = ["FabricConditionWarning"]
    labels = { team = "hpc" }
    severities = { critical = "page" }
    for = { FmsupervisorDown = "15m" }

## What to expect of them

- A machine without NVSwitch raises none of these, unless its supervisor does not answer.
- What cannot be observed is no fault: its series are left out, and a condition (a warning) says so.
- A state that passes by itself must last for the time given below; one that comes and goes faster does not fire. Where
  a single moment counts (a lost switch, a crash loop, a fatal SXid) the alert looks back or holds instead, so that it
  is one alert however often it happens.
- Counters begin anew with the supervisor. An alert that counts may then come later, never wrongly.

`critical` means that somebody should look now, `warning` in the morning.

## Alerts

| alert | severity | after | conditions |
|---|---|---|---|
"""

_RECORDED = """\
## Recorded series

`instance:` ones have all labels of their target, `cluster:` ones are by cluster. Nodes that do not answer are in none
of them.

| series | meaning |
|---|---|
"""


def render_reference() -> str:
    """The whole document."""
    rows = "".join(map(_row, ALERTS))
    sections = "\n".join(map(_section, ALERTS))
    recorded = "".join(f"| `{one.name}` | {one.help} |\n" for one in RECORDINGS)
    return f"{_INTRODUCTION}{rows}\n{sections}\n{_RECORDED}{recorded}"


def _row(alert: Alert) -> str:
    return f"| [{alert.name}](#{alert.name.lower()}) | {alert.urgency} | {alert.lasts} | {_conditions(alert)} |\n"


def _conditions(alert: Alert) -> str:
    if alert.is_for_the_rest:
        return "every other one of this severity"
    return ", ".join(f"[{code}](runbook.md#{REGISTRY[code].anchor})" for code in alert.codes)


def _section(alert: Alert) -> str:
    return f"### {alert.name}\n\n{_plain(alert.summary)} {_plain(describe(alert))}\n\n    {alert.expression}\n"


def _plain(text: str) -> str:
    """The text with the names of labels instead of templates."""
    text = re.sub(r"\{\{ range .*?\{\{ end \}\}", "(they are listed)", text)
    text = re.sub(r"\{\{ with \$labels\.(\w+) \}\}(.*?)\{\{ \. \}\}(.*?)\{\{ end \}\}", r"\2{{ $labels.\1 }}\3", text)
    text = text.replace("{{ $labels.<node> }}", "the node").replace("{{ $value }}", "VALUE")
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: found[1].upper(), text)
    return text.replace("<link_sxids>", "link_sxids_per_hour").replace("<selector>", "selector")
