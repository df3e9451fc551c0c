import pytest

from vlcache_hf.store.policy import protected_goes_first

DAY = 24 * 3600
NOW = 10.0 * DAY


@pytest.mark.parametrize(
    "probation_bytes, probation_use, protected_use, expected",
    [
        (0, None, None, False),
        (0, None, NOW, True),
        (50, NOW - 5, None, False),
        (10, NOW - 5, NOW - 9, True),  # a tenth of the cap is left to those on probation
        (11, NOW - 5, NOW - 9, False),
        (11, NOW - 9, NOW - 5, False),
        (11, NOW - 5, NOW - DAY + 1, False),
        (11, NOW - 5, NOW - DAY - 1, True),  # protection has lapsed
        (11, NOW - 2 * DAY, NOW - DAY - 1, False),  # but the other one was used even earlier
    ],
)
def test_who_goes_first(probation_bytes, probation_use, protected_use, expected):
    assert protected_goes_first(probation_bytes, 100, probation_use, protected_use, NOW) is expected
