"""Stories for alert rules: what is scraped minute by minute, and which alerts fire when; ``promtool`` is the judge."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from fmsupervisor.mixin.options import Options
from fmsupervisor.mixin.render import files

TARGET = {"job": "fmsupervisor", "cluster": "c1", "instance": "node1:9752"}
GONE = "_"  # not there; Prometheus goes on for five minutes with what was there before,
STALE = "stale"  # unless the target's last scrape was without it


def minutes(*parts: tuple[float | str, int]) -> str:
    """Values minute by minute: each for so many minutes."""
    return " ".join(str(value) for value, count in parts for _ in range(count))


@dataclass(frozen=True)
class Firing:
    """One alert that is expected: its labels besides those of the target, its value, text that only a query gives."""

    labels: dict[str, str] = field(default_factory=dict)
    value: float = 1
    listed: str = ""
    is_of_target: bool = True


@dataclass(frozen=True)
class Story:
    """``series`` are those of one node, written without the labels of the target; ``expected`` is by minute."""

    alert: str
    name: str
    series: dict[str, str]
    expected: dict[int, tuple[Firing, ...]]

    def __str__(self) -> str:
        return f"{self.alert}-{self.name}".replace(" ", "-")


def with_target(series: str) -> str:
    """The series with the labels of the target."""
    name, _, labels = series.rstrip("}").partition("{")
    target = ", ".join(f'{label}="{value}"' for label, value in TARGET.items())
    return f"{name}{{{', '.join(filter(None, (target, labels)))}}}"


def judge(stories: Sequence[Story], directory: Path) -> str:
    """What promtool has to say against them; nothing when all are true.

    Each alert has a file to itself, since promtool evaluates all rules of a file for each test in it.
    """
    rules = yaml.safe_load(files(Options())["alerts.yaml"])["groups"][0]["rules"]
    documents = {}
    for rule in rules:
        tests = [_test(story, rule) for story in stories if story.alert == rule["alert"]]
        if tests:
            name = f"rule-{rule['alert']}.yaml"
            (directory / name).write_text(yaml.safe_dump({"groups": [{"name": "alert", "rules": [rule]}]}))
            documents[rule["alert"]] = {"rule_files": [name], "evaluation_interval": "1m", "tests": tests}
    return run(documents, directory)


def _test(story: Story, rule: dict[str, dict[str, str]]) -> dict[str, object]:
    return {
        "name": str(story),
        "interval": "1m",
        "input_series": [{"series": with_target(name), "values": values} for name, values in story.series.items()],
        "alert_rule_test": [
            {
                "eval_time": f"{minute}m",
                "alertname": story.alert,
                "exp_alerts": [_expected(rule, firing) for firing in firings],
            }
            for minute, firings in story.expected.items()
        ],
    }


def run(documents: Mapping[str, object], directory: Path) -> str:
    """What ``promtool test rules`` has to say against the documents; nothing when all is as expected."""
    names = []
    for name, document in documents.items():
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(document))
        names.append(f"{name}.yaml")
    command = ("promtool", "test", "rules", *names)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=directory)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def _expected(rule: dict[str, dict[str, str]], firing: Firing) -> dict[str, object]:
    """The alert as promtool wants it: the rule's texts with the labels and the value put in."""
    labels = (TARGET if firing.is_of_target else {"job": TARGET["job"]}) | firing.labels | rule["labels"]
    original = labels | firing.labels  # the series' own severity is overwritten, its other labels are not

    def put_in(found: "re.Match[str]") -> str:
        template = found[1].strip()
        if template == "$value":
            return f"{firing.value:g}"
        if template.endswith("| toLower"):
            return original[template.split()[0].removeprefix("$labels.")].lower()
        return original[template.removeprefix("$labels.")]

    def put_in_if_there(found: "re.Match[str]") -> str:
        return found[2].replace("{{ . }}", original[found[1]]) if found[1] in original else ""

    texts = {}
    for name, text in rule["annotations"].items():
        listed = re.sub(r"\{\{ range .*\{\{ end \}\}", firing.listed, text, flags=re.DOTALL)
        chosen = re.sub(r"\{\{ with \$labels\.(\w+) \}\}(.*?)\{\{ end \}\}", put_in_if_there, listed)
        texts[name] = re.sub(r"\{\{([^}]*)\}\}", put_in, chosen)
    return {"exp_labels": labels, "exp_annotations": texts}
