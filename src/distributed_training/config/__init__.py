"""Typed settings and where each value came from. Imports nothing else of this package, and no torch."""

from distributed_training.config.config import Config, Origin
from distributed_training.config.errors import ConfigError, DistributedTrainingError
from distributed_training.config.load import get_config, load_config
from distributed_training.config.sagemaker import SageMakerConfig
from distributed_training.config.schema import (
    AugmentConfig,
    CheckpointConfig,
    DataConfig,
    EarlyStoppingConfig,
    FeedConfig,
    ModelConfig,
    NetworkConfig,
    RecordConfig,
    RunConfig,
    StrategyConfig,
    TrackingConfig,
    TrainingConfig,
)
from distributed_training.config.tuning import TuningConfig

__all__ = [
    "AugmentConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DistributedTrainingError",
    "EarlyStoppingConfig",
    "FeedConfig",
    "ModelConfig",
    "NetworkConfig",
    "Origin",
    "RecordConfig",
    "RunConfig",
    "SageMakerConfig",
    "StrategyConfig",
    "TrackingConfig",
    "TrainingConfig",
    "TuningConfig",
    "get_config",
    "load_config",
]
