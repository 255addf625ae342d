"""Lets the tests of this directory import what they share: pytest's importlib mode does not."""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
