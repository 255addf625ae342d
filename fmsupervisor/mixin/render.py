"""The files of the mixin, by name."""

import json
from collections.abc import Mapping, Sequence

from fmsupervisor.mixin import alerts, recording
from fmsupervisor.mixin.dashboards import dashboards
from fmsupervisor.mixin.options import Options

_HEAD = "# Made by: python -m fmsupervisor.mixin. Change the options (docs/alerts.md), not this file.\n"
_COLUMNS = 120

Groups = Sequence[Mapping[str, object]]


def files(options: Options) -> dict[str, str]:
    """The text of each file, by its name."""
    alert_groups = [{"name": "fmsupervisor.alerts", "rules": list(map(dict, alerts.rules(options)))}]
    recording_groups = [{"name": "fmsupervisor.recording", "rules": list(map(dict, recording.rules(options)))}]
    return {
        "alerts.yaml": _yaml({"groups": alert_groups}),
        "recording.yaml": _yaml({"groups": recording_groups}),
        "prometheusrule.yaml": _yaml(_kubernetes([*recording_groups, *alert_groups])),
        **{f"{name}.json": json.dumps(document, indent=2) + "\n" for name, document in dashboards(options).items()},
    }


def _kubernetes(groups: Groups) -> Mapping[str, object]:
    """The same rules as an object of the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "fmsupervisor"},
        "spec": {"groups": groups},
    }


def _yaml(document: object) -> str:
    import yaml  # noqa: PLC0415 - heavy

    class Dumper(yaml.SafeDumper):
        """Without anchors: the same rules stand in several places."""

        def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - the signature is PyYAML's
            return True

    return _HEAD + yaml.dump(document, Dumper=Dumper, sort_keys=False, width=_COLUMNS, allow_unicode=True)
