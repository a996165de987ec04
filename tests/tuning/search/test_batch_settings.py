"""What `--batch` asks for, with and without a batch of the task's own."""

from __future__ import annotations

import pytest

from autoprec.core.speed.assumptions import SPEED
from autoprec.errors import UsageError
from autoprec.tuning.options import Options
from tests.tuning.flow.test_preflight import built


@pytest.mark.parametrize(
    ("options", "batch_size", "share"),
    [
        (Options(), None, SPEED.knee_share),
        (Options(batch="goodput"), None, SPEED.knee_share),
        (Options(batch="max"), None, SPEED.most_share),
        (Options(batch=64), None, SPEED.most_share),
        (Options(), 64, SPEED.most_share),
    ],
)
def test_a_smaller_batch_may_lose_speed_where_the_knee_is_wanted_and_batches_are_free(
    options: Options, batch_size: int | None, share: float
) -> None:
    assert built(options, batch_size=batch_size)[0].batch_share == share


def test_a_batch_beside_the_tasks_own_is_refused() -> None:
    with pytest.raises(
        UsageError, match="`batch=64` given, but BATCH_SIZE = 32 of the task file is kept"
    ):
        built(Options(batch=64), batch_size=32)
    _, said = built(Options(batch="max"), batch_size=32)
    assert said == ["BATCH_SIZE = 32 of the task file is kept, so `batch=max` chooses nothing"]
