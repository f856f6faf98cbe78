"""One hierarchy of errors, each with the exit code a script can tell it by."""

from __future__ import annotations

import pytest

from distributed_training.runtime import errors
from distributed_training.runtime.errors import DistributedTrainingError

EXIT_CODES = {
    "BuildError": 2,
    "CheckpointError": 4,
    "CloudError": 11,
    "ConfigError": 2,
    "DataError": 3,
    "DistributedTrainingError": 1,
    "FeedError": 9,
    "HubError": 10,
    "MissingDependencyError": 2,
    "ModelError": 3,
    "OutOfMemoryError": 6,
    "ProtocolError": 8,
    "RanksError": 7,
    "RunDirectoryError": 4,
    "SearchError": 12,
    "BenchError": 13,
    "TrainingDivergedError": 5,
}


@pytest.mark.parametrize(("name", "code"), EXIT_CODES.items())
def test_every_error_is_one_of_ours_with_its_exit_code(name: str, code: int) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, DistributedTrainingError)
    assert kind.exit_code == code
    assert kind.__doc__
    with pytest.raises(DistributedTrainingError, match="what happened"):
        raise kind("what happened")


def test_these_are_all_there_are() -> None:
    assert sorted(errors.__all__) == sorted(EXIT_CODES)


def test_no_exit_code_is_taken_for_success() -> None:
    assert 0 not in EXIT_CODES.values()
