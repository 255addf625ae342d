"""The catalogue of SXids: what a number means to the driver that is loaded."""

import pytest

from fmsupervisor.sxid import catalogue, is_ambiguous, lookup


@pytest.mark.parametrize(
    ("number", "version", "symbol"),
    [
        pytest.param(12028, None, "NPORT_EGRESS_PRIVRSPERR", id="known to all"),
        pytest.param(12028, "535.161.08", "NPORT_EGRESS_PRIVRSPERR", id="known to all, 535"),
        pytest.param(28006, "535.161.08", "NPORT_MULTICASTTSTATE_CRUMBSTORE_MCTO_ERR", id="multicast in 535"),
        pytest.param(28003, "525.147.05", "NPORT_MULTICASTTSTATE_CRUMBSTORE_ECC_LIMIT_ERR", id="multicast in 525"),
        pytest.param(28003, "550.163.01", "OSFP_THERM_OVERT_ACTIVATED", id="the same number in 550"),
        pytest.param(29006, "545.29.06", "NPORT_REDUCTIONTSTATE_CRUMBSTORE_RTO_ERR", id="reduction in 545"),
        pytest.param(29006, "550.163.01", "NPORT_MULTICASTTSTATE_CRUMBSTORE_MCTO_ERR", id="multicast in 550"),
        pytest.param(29006, "595.45.04", "NPORT_MULTICASTTSTATE_CRUMBSTORE_MCTO_ERR", id="multicast in 595"),
        pytest.param(29006, "nonsense", "NPORT_MULTICASTTSTATE_CRUMBSTORE_MCTO_ERR", id="a version nobody can read"),
        pytest.param(12034, "515.105.01", "NPORT_EGRESS_TIMESTAMP_LOG", id="a log record in 515"),
    ],
)
def test_a_number_means_what_the_loaded_driver_means(number: int, version: str | None, symbol: str) -> None:
    found = lookup(number, version)
    assert found is not None
    assert (found.number, found.symbol) == (number, f"NVSWITCH_ERR_HW_{symbol}")


@pytest.mark.parametrize(
    ("number", "version"),
    [(28006, "570.211.01"), (30006, "535.161.08"), (27004, "535.161.08"), (28003, "515.105.01"), (99999, None)],
)
def test_a_number_that_the_driver_does_not_have_means_nothing(number: int, version: str | None) -> None:
    assert lookup(number, version) is None


def test_numbers_with_more_than_one_meaning_are_known_as_such() -> None:
    ambiguous = {number for number in range(40_000) if is_ambiguous(number)}
    differing = {
        number
        for number in range(40_000)
        if len({(found := lookup(number, version)) and found.symbol for version in ("535.1", "550.1")}) > 1
    }
    assert ambiguous >= differing & set(range(28000, 40_000))
    assert 12028 not in ambiguous


def test_no_driver_has_more_numbers_than_the_catalogue() -> None:
    """The bound on the series of the metrics."""
    for version in ("515.1", "535.1", "550.1", None):
        assert sum(lookup(number, version) is not None for number in range(40_000)) <= len(catalogue())
