"""Datasets, the sample plan and the local loader."""

from distributed_training.data.adapt import as_source
from distributed_training.data.arrays import ArrayDataset
from distributed_training.data.augment import ImageTransform
from distributed_training.data.base import Batch, BatchSource, Dataset, KeyedDataset, Splits
from distributed_training.data.encoded import DecodeImages
from distributed_training.data.loader import Loader
from distributed_training.data.plan import PLAN_VERSION, Plan
from distributed_training.data.torch_dataset import PreprocessedDataset, as_dataset

__all__ = [
    "PLAN_VERSION",
    "ArrayDataset",
    "Batch",
    "BatchSource",
    "Dataset",
    "DecodeImages",
    "ImageTransform",
    "KeyedDataset",
    "Loader",
    "Plan",
    "PreprocessedDataset",
    "Splits",
    "as_dataset",
    "as_source",
]
