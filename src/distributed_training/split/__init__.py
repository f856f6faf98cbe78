"""Training, validation and inference with data and CPUs on some machines and the GPU on another.

`GPUTrainer` is the side with the model, `CPULoader` the side with the data, `ColabGPUTrainer` a `GPUTrainer` behind a
tunnel; `serving` and `feeding` are the same from a config file, for `dtrain serve` and `dtrain feed`.
"""

from distributed_training.split.colab_trainer import ColabGPUTrainer
from distributed_training.split.cpu_loader import CPULoader
from distributed_training.split.gpu_trainer import GPUTrainer

__all__ = ["CPULoader", "ColabGPUTrainer", "GPUTrainer"]
