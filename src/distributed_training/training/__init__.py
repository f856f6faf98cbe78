"""The loop, evaluation, prediction, callbacks: `Trainer` lives here."""

from distributed_training.training.callbacks import Callback, EarlyStopping
from distributed_training.training.result import TrainingResult
from distributed_training.training.stepwise import create_distributed_trainer
from distributed_training.training.trainer import Trainer

__all__ = ["Callback", "EarlyStopping", "Trainer", "TrainingResult", "create_distributed_trainer"]
