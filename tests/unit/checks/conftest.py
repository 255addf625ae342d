"""Lets the tests of this directory import what they share, also with those above it (importlib mode does not)."""

import os
import sys

sys.path[:0] = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]
