"""Alert rules, recording rules and dashboards, made from the registries of conditions and metrics.

``python -m fmsupervisor.mixin`` writes them with the labels and selectors of one's own. Not for the daemon.
"""
