"""The files of the mixin: current, complete, accepted by promtool, and as the user's options say."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from fmsupervisor.conditions import REGISTRY, Severity
from fmsupervisor.core.state import ExitClass
from fmsupervisor.core.verdict import FabricState
from fmsupervisor.errors import ConfigError
from fmsupervisor.facts import DriverState
from fmsupervisor.mixin.alerts import ALERTS, NAMES, rules, runbook_url
from fmsupervisor.mixin.dashboards import dashboards
from fmsupervisor.mixin.expression import render
from fmsupervisor.mixin.options import Options, load
from fmsupervisor.mixin.recording import RECORDINGS
from fmsupervisor.mixin.reference import render_reference
from fmsupervisor.mixin.render import files
from fmsupervisor.report.metrics_table import METRICS
from tests.prometheus._promtool import GONE, TARGET, minutes, run, with_target

REPOSITORY = Path(__file__).parents[2]
PACKAGED = REPOSITORY / "packaging/prometheus"
REFERENCE = REPOSITORY / "docs/alerts.md"

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")

OTHER_OPTIONS = """
selector = 'job="a/b", env="x"'
cluster_label = "region"
node_label = "node"
runbook_url = "https://wiki.example.org/runbook#{anchor}"
link_sxids_per_hour = 3
omit = ["FabricConditionWarning"]
labels = { team = "hpc" }
severities = { critical = "page" }
for = { FmsupervisorDown = "15m" }
"""


def expressions() -> list[str]:
    asked = [
        target["expr"]
        for document in _documents(Options()).values()
        for panel in document["panels"]
        for target in panel["targets"]
    ]
    return [*(str(rule["expr"]) for rule in rules(Options())), *(one.expression for one in RECORDINGS), *asked]


def _documents(options: Options) -> dict[str, Any]:
    return dict(dashboards(options))


class TestFiles:
    @pytest.mark.parametrize("name", files(Options()))
    def test_are_current(self, name: str) -> None:
        made = files(Options())[name]
        if os.environ.get("RENEW_GOLDEN"):
            PACKAGED.mkdir(exist_ok=True)
            (PACKAGED / name).write_text(made)
        assert (PACKAGED / name).read_text() == made

    def test_reference_is_current(self) -> None:
        if os.environ.get("RENEW_GOLDEN"):
            REFERENCE.write_text(render_reference())
        assert REFERENCE.read_text() == render_reference()

    def test_the_examples_of_the_reference_are_accepted(self, tmp_path: Path) -> None:
        blocks = re.findall(r"(?:^    .*\n)+", REFERENCE.read_text(), re.MULTILINE)
        options = next(block for block in blocks if "selector = " in block)
        assert load(textwrap.dedent(options), "example", NAMES) != Options()
        if shutil.which("promtool"):
            configuration = tmp_path / "prometheus.yml"
            configuration.write_text(textwrap.dedent(next(block for block in blocks if "scrape_configs" in block)))
            command = ("promtool", "check", "config", str(configuration))
            assert subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0

    def test_nothing_else_lies_there(self) -> None:
        assert {path.name for path in PACKAGED.iterdir()} == set(files(Options()))

    @needs_promtool
    @pytest.mark.parametrize("options", [Options(), load(OTHER_OPTIONS, "x.toml", NAMES)], ids=["default", "others"])
    def test_promtool_accepts_the_rules(self, options: Options, tmp_path: Path) -> None:
        made = files(options)
        for name in ("alerts.yaml", "recording.yaml"):
            (tmp_path / name).write_text(made[name])
            command = ("promtool", "check", "rules", "--lint-fatal", str(tmp_path / name))
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
            assert (done.returncode, done.stderr) == (0, "")

    def test_the_object_for_kubernetes_has_the_same_rules(self) -> None:
        made = {name: yaml.safe_load(text) for name, text in files(Options()).items() if name.endswith(".yaml")}
        groups = made["recording.yaml"]["groups"] + made["alerts.yaml"]["groups"]
        assert made["prometheusrule.yaml"]["spec"] == {"groups": groups}

    def test_are_written_by_the_command(self, tmp_path: Path) -> None:
        options = tmp_path / "mixin.toml"
        options.write_text(OTHER_OPTIONS)
        done = _command("--options", str(options), str(tmp_path / "out"))
        assert (done.returncode, done.stderr) == (0, "")
        expected = files(load(OTHER_OPTIONS, "", NAMES))
        assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == expected

    def test_the_command_tells_mistakes(self, tmp_path: Path) -> None:
        options = tmp_path / "mixin.toml"
        options.write_text("selektor = ''")
        done = _command("--options", str(options), str(tmp_path / "out"))
        assert (done.returncode, done.stderr.split(":")[1:3]) == (
            78,
            [
                " selektor",
                " no such key; there are alerts_url, cluster_label, for, labels, link_sxids_per_hour, node_label, omit, runbook_url, selector, severities\n",
            ],
        )
        assert _command(str(options / "below")).returncode == 1


def _command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = (sys.executable, "-m", "fmsupervisor.mixin", *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


class TestAlerts:
    def test_hear_every_condition_that_is_not_only_an_explanation(self) -> None:
        heard = {code for alert in ALERTS for code in alert.codes}
        wanted = {one.code for one in REGISTRY.values() if one.severity is not Severity.INFO}
        assert wanted <= heard

    def test_hear_each_condition_once(self) -> None:
        heard = [code for alert in ALERTS for code in alert.codes]
        assert len(heard) == len(set(heard))

    @pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
    def test_are_complete(self, alert: Any) -> None:
        assert re.fullmatch(r"([A-Z]+[a-z]+)+", alert.name.replace("SXid", "Sxid"))
        assert re.fullmatch(r"\d+[mh]", alert.lasts)
        assert alert.summary.endswith(".")
        assert "#{{ $labels.code | toLower }}" in runbook_url(alert, Options()) or re.search(
            rf"^#+ {runbook_url(alert, Options()).partition('#')[2]}$",
            (REPOSITORY / runbook_url(alert, Options()).partition("#")[0]).read_text(),
            re.MULTILINE | re.IGNORECASE,
        )


class TestExpressions:
    def test_name_only_what_is_exported_or_recorded(self) -> None:
        recorded = {one.name for one in RECORDINGS}
        named = {name for one in expressions() for name in re.findall(r"([a-z_:0-9]+)\{", one)}
        assert named <= {*METRICS, "up", *recorded}
        assert recorded <= {name for one in expressions() for name in re.findall(r"[a-z_0-9]+:[a-z_:0-9]+", one)}

    def test_a_metric_that_is_not_exported_is_a_mistake(self) -> None:
        with pytest.raises(LookupError, match="fabricmanager_upp is not exported"):
            render("fabricmanager_upp{}", Options())

    def test_name_only_labels_and_values_that_there_are(self) -> None:
        known = {
            "fabricmanager_state": set(FabricState),
            "nvswitch_driver_state": {*DriverState.__members__, "other"},
            "fabricmanager_exits_total": set(ExitClass),
        }
        of_targets = {"job", "cluster", "instance"}
        for expression in expressions():
            for name, matchers in re.findall(r"(?<![:\w])(\w+)\{([^}]*)\}", expression):
                if name not in METRICS:
                    continue
                for label, values in re.findall(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"', matchers):
                    assert label in {*METRICS[name].labels, *of_targets}
                    if label in ("state", "class"):
                        assert set(values.split("|")) <= known[name]
                    if label == "code":
                        assert set(values.split("|")) <= set(REGISTRY)


class TestOptions:
    def test_reach_every_rule(self) -> None:
        made = list(rules(load(OTHER_OPTIONS, "x.toml", NAMES)))
        assert {rule["alert"] for rule in made} == NAMES - {"FabricConditionWarning"}
        for rule in made:
            series = re.findall(r"\w+\{([^}]*)\}", str(rule["expr"]))
            assert all(matchers.startswith('job="a/b", env="x"') for matchers in series)
            assert rule["labels"]["severity"] in ("page", "warning")  # type: ignore[index]
            assert rule["labels"]["team"] == "hpc"  # type: ignore[index]
            assert "instance" not in str(rule)
        assert next(rule["for"] for rule in made if rule["alert"] == "FmsupervisorDown") == "15m"

    def test_reach_every_query_of_the_dashboards(self) -> None:
        for name, document in _documents(load(OTHER_OPTIONS, "x.toml", NAMES)).items():
            for panel in document["panels"]:
                for target in panel["targets"]:
                    assert "instance=" not in target["expr"], name
                    assert 'region=~"$cluster"' in target["expr"], name

    def test_none_is_the_default(self) -> None:
        assert load("", "x.toml", NAMES) == Options()

    @pytest.mark.parametrize(
        ("text", "mistake"),
        [
            ("x", "Expected '=' after a key"),
            ("for_ = {}", "for_: no such key"),
            ("selector = ' '", "selector: empty"),
            ("selector = 1", "selector: not a string"),
            ("node_label = 'a-b'", "node_label: 'a-b' is not the name of a label"),
            ("runbook_url = 'x'", "runbook_url: 'x' has no {anchor} in it"),
            ("link_sxids_per_hour = 0", "link_sxids_per_hour: not a positive integer"),
            ("link_sxids_per_hour = true", "link_sxids_per_hour: not a positive integer"),
            ("omit = 'x'", "omit: not a list of names"),
            ("omit = ['x']", "omit: 'x' is none of"),
            ("labels = 'x'", "labels: not a table of strings"),
            ("labels = {a-b = 'x'}", "labels: 'a-b' is not the name of a label"),
            ("severities = {bad = 'x'}", "severities: 'bad' is none of critical, warning"),
            ("for = {FmsupervisorDown = '5'}", "for: '5' is not a duration"),
            ("for = {x = '5m'}", "for: 'x' is none of"),
        ],
    )
    def test_mistakes_are_told(self, text: str, mistake: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(mistake)):
            load(text, "x.toml", NAMES)

    def test_all_mistakes_are_told_at_once(self) -> None:
        with pytest.raises(ConfigError) as error:
            load("a = 1\nselector = ''", "x.toml", NAMES)
        assert str(error.value).count("x.toml: ") == 2


def _recorded(series: dict[str, str], *expected: tuple[int, str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": expression, "eval_time": f"{minute}m", "exp_samples": samples}
            for minute, expression, samples in expected
        ],
    }


def _node(name: str, series: str) -> str:
    return with_target(series).replace(TARGET["instance"], name)


@needs_promtool
class TestRecordings:
    """Each is what docs/alerts.md says it is."""

    def judge(self, document: dict[str, Any], directory: Path) -> str:
        (directory / "recording.yaml").write_text(files(Options())["recording.yaml"])
        test = {"rule_files": ["recording.yaml"], "evaluation_interval": "1m", "tests": [document]}
        return run({"test": test}, directory)

    def test_share_of_nodes(self, tmp_path: Path) -> None:
        series = {}
        for name, state in (("a", "configured"), ("b", "configured"), ("c", "failed"), ("d", "not-applicable")):
            for other in ("configured", "failed", "not-applicable"):
                series[_node(name, f'fabricmanager_state{{state="{other}"}}')] = minutes((float(state == other), 10))
        ratio, count = "cluster:fabric_configured:ratio", "cluster:fabric_nodes:count"
        test = _recorded(
            series,
            (5, count, [{"labels": f'{count}{{cluster="c1"}}', "value": 3}]),
            (5, f"round({ratio}, 0.001)", [{"labels": '{cluster="c1"}', "value": 0.667}]),
        )
        assert self.judge(test, tmp_path) == ""

    def test_share_of_the_day(self, tmp_path: Path) -> None:
        series = {
            _node("a", 'fabricmanager_state{state="configured"}'): minutes((1, 30), (0, 10)),
            _node("a", 'fabricmanager_state{state="not-applicable"}'): minutes((0, 40)),
        }
        expected = [{"labels": '{cluster="c1"}', "value": 0.75}]
        assert (
            self.judge(_recorded(series, (39, "round(cluster:fabric_configured:avg_1d, 0.01)", expected)), tmp_path)
            == ""
        )

    def test_time_to_configured(self, tmp_path: Path) -> None:
        name = "fabricmanager_configure_duration_seconds"
        series = {_node(str(value), name): minutes((value, 5)) for value in range(10, 21)}
        recorded = f"cluster:{name}:quantile"
        values = {"0.5": 15, "0.9": 19, "1": 20}
        expected = [
            {"labels": f'{recorded}{{cluster="c1", quantile="{quantile}"}}', "value": value}
            for quantile, value in values.items()
        ]
        assert self.judge(_recorded(series, (4, recorded, expected)), tmp_path) == ""

    def test_the_first_sxid_is_in_the_rate(self, tmp_path: Path) -> None:
        """The counter of its number and switch is born with it."""
        series = {
            _node("a", "fabricmanager_up"): minutes((1, 60)),
            _node("a", 'nvswitch_sxid_total{pci_bus_id="0000:05:00.0", sxid="20034", severity="fatal"}'): minutes(
                (GONE, 30), (1, 30)
            ),
        }
        increase = 'round(increase(instance:nvswitch_sxid:sum{severity="fatal"}[1h]), 0.1)'
        labels = f'{{job="{TARGET["job"]}", cluster="c1", instance="a", severity="fatal"}}'
        nonfatal = 'cluster:nvswitch_sxid:rate1h{severity="non-fatal"}'
        test = _recorded(
            series,
            (59, increase, [{"labels": labels, "value": 1}]),
            (
                59,
                nonfatal,
                [{"labels": 'cluster:nvswitch_sxid:rate1h{cluster="c1", severity="non-fatal"}', "value": 0}],
            ),
        )
        assert self.judge(test, tmp_path) == ""

    def test_waiting_guests_and_ends(self, tmp_path: Path) -> None:
        series = {
            _node("a", 'fmsupervisor_guest_restart_required{pci_bus_id="0000:18:00.0"}'): minutes((1, 10)),
            _node("b", 'fmsupervisor_guest_restart_required{pci_bus_id="0000:18:00.0"}'): minutes((1, 10)),
            _node("b", 'fmsupervisor_guest_restart_required{pci_bus_id="0000:2a:00.0"}'): minutes((0, 10)),
            _node("a", 'fabricmanager_exits_total{class="unexpected"}'): minutes((0, 5), (2, 5)),
        }
        waiting, ends = "cluster:guests_waiting:sum", "cluster:fabricmanager_exits:increase1d"
        test = _recorded(
            series,
            (9, waiting, [{"labels": f'{waiting}{{cluster="c1"}}', "value": 2}]),
            (9, f"round({ends})", [{"labels": '{cluster="c1", class="unexpected"}', "value": 2}]),
        )
        assert self.judge(test, tmp_path) == ""
