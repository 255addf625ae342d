"""PromQL as it stands in the tables, made into what Prometheus is given.

In the tables a series of ours is written with its braces, ``fabricmanager_up{}``, and gets the user's selector put in;
``<cluster>`` and ``<node>`` are the user's names of these labels, ``<link_sxids>`` is the option link_sxids_per_hour. A
name that is not in ``report/metrics_table.py`` is a mistake in a table. Names with a colon are recorded and taken as
they are.
"""

import re

from fmsupervisor.mixin.options import Options
from fmsupervisor.report.metrics_table import METRICS

_SERIES = re.compile(r"(?<![:\w])([a-z][a-z0-9_]*)\{([^}]*)\}")
_OF_PROMETHEUS = frozenset({"up"})


def render(expression: str, options: Options, *more: str) -> str:
    """The expression with the user's selector and labels; ``more`` are further label matchers.

    Raises LookupError when it names a metric that is not exported.
    """

    def select(found: "re.Match[str]") -> str:
        name, matchers = found[1], found[2]
        if name not in METRICS and name not in _OF_PROMETHEUS:
            raise LookupError(f"{name} is not exported")
        return f"{name}{{{', '.join(filter(None, (options.selector, *more, matchers)))}}}"

    return name_labels(_SERIES.sub(select, " ".join(expression.split())), options)


def name_labels(text: str, options: Options) -> str:
    """The text with the user's names of labels."""
    return (
        text.replace("<cluster>", options.cluster_label)
        .replace("<node>", options.node_label)
        .replace("<link_sxids>", str(options.link_sxids_per_hour))
    )
