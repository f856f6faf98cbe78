"""One hierarchy of errors. A message says what happened, to which rank, peer or file, and what to do next."""

from __future__ import annotations

from distributed_training.config.errors import ConfigError, DistributedTrainingError

__all__ = [
    "BenchError",
    "BuildError",
    "CheckpointError",
    "CloudError",
    "ConfigError",
    "DataError",
    "DistributedTrainingError",
    "FeedError",
    "HubError",
    "MissingDependencyError",
    "ModelError",
    "OutOfMemoryError",
    "ProtocolError",
    "RanksError",
    "RunDirectoryError",
    "SearchError",
    "TrainingDivergedError",
]


class DataError(DistributedTrainingError):
    """A dataset is empty, damaged, or holds a sample that cannot be used. Names the file, line or sample."""

    exit_code = 3


class ModelError(DistributedTrainingError):
    """A model cannot be built, or returns something that is none of the three accepted forms."""

    exit_code = 3


class CheckpointError(DistributedTrainingError):
    """A checkpoint cannot be written, read or applied."""

    exit_code = 4


class RunDirectoryError(DistributedTrainingError):
    """The folder of a run cannot be made, read or written."""

    exit_code = 4


class TrainingDivergedError(DistributedTrainingError):
    """Loss or gradients were not finite for several steps in a row."""

    exit_code = 5


class OutOfMemoryError(DistributedTrainingError):
    """The device ran out of memory."""

    exit_code = 6


class MissingDependencyError(DistributedTrainingError):
    """An optional library is needed for what was asked."""

    exit_code = 2


class BuildError(DistributedTrainingError):
    """Compiled code of ours cannot be built or loaded here. Names what to install, or what the compiler said."""

    exit_code = 2


class RanksError(DistributedTrainingError):
    """The ranks of a job do not come together, or differ in something that must be equal. Names ranks and address."""

    exit_code = 7


class ProtocolError(DistributedTrainingError):
    """The two sides of a connection do not understand each other, or one of them breaks the rules. Names the peer."""

    exit_code = 8


class FeedError(DistributedTrainingError):
    """Batches do not come from other machines, or cannot go there: nobody there, refused, too slow. Names the peer."""

    exit_code = 9


class HubError(DistributedTrainingError):
    """Something cannot be fetched from the Hugging Face Hub or sent there. Names what, and what to do."""

    exit_code = 10


class CloudError(DistributedTrainingError):
    """A cloud service refuses something or cannot be reached, or a job there failed. Names the call and what to do."""

    exit_code = 11


class SearchError(DistributedTrainingError):
    """A search for hyper-parameters came to nothing. Names the trial that failed first, and why."""

    exit_code = 12


class BenchError(DistributedTrainingError):
    """A benchmark cannot run here, or what it found cannot be written, read or compared. Names the part or file."""

    exit_code = 13
