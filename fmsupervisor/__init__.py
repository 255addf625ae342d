"""Supervisor of NVIDIA Fabric Manager on hosts that keep their NVSwitches."""

__version__ = "0.1.0"
