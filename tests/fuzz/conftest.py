"""Lets the tests of this directory import the targets (importlib mode does not), and these the builders of the unit tests."""

import os
import sys

_HERE = os.path.dirname(__file__)
_UNIT = os.path.join(os.path.dirname(_HERE), "unit")
sys.path[:0] = [_HERE, _UNIT, os.path.join(_UNIT, "core")]
