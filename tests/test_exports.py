"""The public surface: a change here is a change for users."""

from __future__ import annotations

import distributed_training


def test_the_public_names_are_these() -> None:
    assert distributed_training.__all__ == [
        "AcceleratedTrainer",
        "ArrayDataset",
        "BasicTrainer",
        "CPULoader",
        "Callback",
        "ColabGPUTrainer",
        "Config",
        "Dataset",
        "DistributedTrainingError",
        "EarlyStopping",
        "GPUTrainer",
        "Loader",
        "Plan",
        "Trainer",
        "TrainingResult",
        "__version__",
        "create_distributed_trainer",
        "get_config",
        "get_model",
        "spawn",
    ]
    assert dir(distributed_training) == distributed_training.__all__


def test_every_public_name_can_be_imported() -> None:
    for name in distributed_training.__all__:
        assert getattr(distributed_training, name) is not None
