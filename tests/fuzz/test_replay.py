"""Every kept input through its target, without atheris: the seeds, the corpus, and what was ever found to break one."""

from itertools import pairwise

import pytest
from _targets import FOUND, TARGETS, kept_inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run import UNDER_TEST


@pytest.mark.parametrize("name", TARGETS)
def test_no_kept_input_breaks_its_target(name: str) -> None:
    for label, content in kept_inputs(name):
        try:
            TARGETS[name].check(content)
        except Exception as error:
            raise AssertionError(f"{name}: {label}: {content[:200]!r}") from error


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_damaged_seed_breaks_its_target(name: str, data: st.DataObject) -> None:
    """A seed with pieces cut out, put in, or exchanged with another's."""
    seeds = TARGETS[name].seeds()
    content = data.draw(st.sampled_from(seeds))
    for _ in range(data.draw(st.integers(1, 3))):
        other = data.draw(st.one_of(st.binary(max_size=8), st.sampled_from(seeds)))
        cuts = sorted((data.draw(st.integers(0, len(content))), data.draw(st.integers(0, len(content)))))
        ((start, end),) = pairwise(cuts)
        content = content[:start] + other + content[end:]
    TARGETS[name].check(content[: TARGETS[name].most_bytes])


def test_every_target_says_whose_branches_guide_the_search() -> None:
    assert set(UNDER_TEST) == set(TARGETS)


def test_what_was_found_belongs_to_a_target() -> None:
    assert {path.name for path in FOUND.iterdir() if path.is_dir()} <= set(TARGETS)
