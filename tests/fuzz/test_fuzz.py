"""A short run of the fuzzing, from one seed; `make fuzz` is the long one."""

from __future__ import annotations

import pytest

from tests.fuzz.campaign import fuzz_patches, fuzz_replies, fuzz_series


@pytest.mark.parametrize(("fuzz", "cases"), [(fuzz_patches, 3000), (fuzz_series, 600), (fuzz_replies, 500)])
def test_whatever_comes_in_is_right_or_refused(fuzz, cases):
    figures = fuzz(cases, 20)
    assert not figures.crashes, figures.crashes[0]
    assert figures.outcomes["applied"] > 0 and figures.cases == cases
