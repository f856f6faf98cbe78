"""Every setting there is: one dataclass a section, one docstring a field.

The docstring under a field is what `dtrain config explain` and the documentation print, so it is written for the user.
Defaults are the embedded job: a digit classifier that trains in seconds on a laptop.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from distributed_training.config.check import at_least, between, check_types, positive

Metric = Literal["accuracy", "f1", "f1_macro", "f1_micro", "f1_weighted", "precision", "recall", "perplexity"]


@dataclass(kw_only=True)
class ModelConfig:
    """Which network to train."""

    name: str = "mlp"
    """A named model: mlp, resnet18, resnet34, resnet50, vae, gpt, huggingface. Ignored when `target` is set."""
    target: str | None = None
    """Import path of your own model, `my_module:MyModel`; called with `args` as keyword arguments."""
    num_classes: int | None = None
    """Number of outputs. Left out, it is read from the dataset."""
    pretrained: bool = False
    """Start from trained weights: those in `weights`, or else torchvision's for the resnets."""
    weights: str | None = None
    """A .safetensors or .pth file of weights that `pretrained` loads."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model, such as `hidden: [256, 256]` for mlp."""

    def __post_init__(self) -> None:
        check_types(self, "model")
        self.weights = os.path.expanduser(self.weights) if self.weights is not None else None
        at_least("model.num_classes", self.num_classes, 1)


@dataclass(kw_only=True)
class TrainingConfig:
    """How to train: length, optimizer, schedule, precision."""

    type: Literal["auto", "basic", "accelerated"] = "auto"
    """basic: one device. accelerated: Accelerate, with DeepSpeed if `strategy.zero_stage` is set. auto: `strategy`."""
    epochs: int = 30
    """How many times every sample is used."""
    batch_size: int = 64
    """Samples in one optimizer step, over all ranks, loaders and micro-batches together: these only divide it."""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """The optimizer built from this config."""
    lr: float = 2e-3
    """Peak learning rate. `learning_rate` is accepted too."""
    momentum: float = 0.9
    """Momentum of sgd."""
    weight_decay: float = 0.01
    """Weight decay: decoupled for adamw, L2 for adam and sgd."""
    schedule: Literal["cosine", "linear", "step", "constant"] = "cosine"
    """Learning rate after the warm-up: cosine or linear to zero, divided by ten at each third of the run, constant."""
    warmup_epochs: float = 1.0
    """Epochs over which the learning rate rises from zero; fractions are fine."""
    gradient_clip: float | None = None
    """Largest global norm of the gradient; larger ones are scaled down to it."""
    gradient_accumulation: int = 1
    """Micro-batches that one batch is cut into, to save memory. Does not change the training."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them: less memory, more time."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Run the model through torch.compile. auto: for the recorded step of one GPU, in a training of some minutes."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Replay the whole step on a GPU as one CUDA graph. auto: where the model allows it; on: or else an error."""
    channels_last: Literal["auto", "on", "off"] = "auto"
    """Compute convolutions with the channels innermost. auto: on GPUs in bf16 or fp16."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Arithmetic of the forward and backward pass. auto: bf16 on GPUs that have it, fp32 on the CPU."""
    loss: Literal["auto", "cross_entropy", "mse", "l1", "bce"] = "auto"
    """Criterion for models that return outputs without a loss. auto: cross_entropy for integer targets, else mse."""
    fused: bool = True
    """Let the optimizer update all parameters in one fused kernel where torch has one."""
    nonfinite: Literal["gradients", "loss", "off"] = "gradients"
    """What is checked before each update; a step whose value is NaN or infinite is skipped."""
    max_nonfinite_steps: int = 5
    """Stop with an error after this many non-finite steps in a row."""
    seed: int = 0
    """Seed of everything random: weights, sample order, augmentation, dropout."""
    deterministic: bool = False
    """Use only deterministic kernels; slower on GPUs, bit-identical from run to run."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ... auto takes a GPU when there is one."""
    metrics: list[Metric] = field(default_factory=list)
    """What validation measures beside the loss. Left out: accuracy of classifiers, perplexity of language models."""
    log_every: int = 10
    """Steps between two logged training losses."""

    def __post_init__(self) -> None:
        check_types(self, "training")
        at_least("training.epochs", self.epochs, 1)
        at_least("training.batch_size", self.batch_size, 1)
        positive("training.lr", self.lr)
        between("training.momentum", self.momentum, 0, 1)
        at_least("training.weight_decay", self.weight_decay, 0)
        between("training.warmup_epochs", self.warmup_epochs, 0, self.epochs)
        positive("training.gradient_clip", self.gradient_clip)
        between("training.gradient_accumulation", self.gradient_accumulation, 1, self.batch_size)
        at_least("training.max_nonfinite_steps", self.max_nonfinite_steps, 1)
        between("training.seed", self.seed, 0, 2**63 - 1)
        at_least("training.log_every", self.log_every, 1)


@dataclass(kw_only=True)
class AugmentConfig:
    """Random changes to images, made in whole batches on the device and keyed by (seed, epoch, sample)."""

    crop: int = 0
    """Pad by this many pixels on each side and crop back at a random place."""
    flip: bool = False
    """Mirror left and right with probability one half."""
    mean: list[float] | None = None
    """Mean of each channel, subtracted (in training and evaluation). A single value serves all channels."""
    std: list[float] | None = None
    """Standard deviation of each channel, divided by."""

    def __post_init__(self) -> None:
        check_types(self, "data.augment")
        at_least("data.augment.crop", self.crop, 0)
        for value in self.std or ():
            positive("data.augment.std", value)


@dataclass(kw_only=True)
class DataConfig:
    """What to train on, and how it is loaded."""

    dataset: str = "digits"
    """digits, cifar10, cifar100, synthetic, csv, numpy, parquet, images, huggingface, or `my_module:MyDataset`."""
    root: str = "data"
    """Folder or file the dataset is read from."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the dataset, such as `label: species` for csv."""
    validation_fraction: float = 0.2
    """Share held out for validation where the dataset has no split of its own."""
    shuffle: bool = True
    """Visit the samples in a new order each epoch."""
    drop_last: bool = False
    """Leave out the last, smaller batch of an epoch. Kept, it is weighted by its size."""
    preprocess: str | None = None
    """Import path of a function applied to each sample, `my_module:fn`. It may take a second argument `rng`."""
    device_transform: str | None = None
    """Import path of a function applied to each batch on the device, before `augment`: `my_module:fn`."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """Batched random augmentation on the device."""
    num_workers: int = 0
    """Processes that load ahead; 0 loads in the training process."""
    pin_memory: bool | None = None
    """Page-locked batches for faster copies to the GPU. Left out: on with CUDA."""
    resident: Literal["auto", "on", "off"] = "auto"
    """Keep array data on the GPU and gather batches there. auto: where it takes a tenth of the GPU's memory or less."""

    def __post_init__(self) -> None:
        if isinstance(self.augment, dict):
            self.augment = AugmentConfig(**self.augment)
        check_types(self, "data")
        self.root = os.path.expanduser(self.root)
        between("data.validation_fraction", self.validation_fraction, 0, 0.9)
        between("data.num_workers", self.num_workers, 0, 1024)


@dataclass(kw_only=True)
class NetworkConfig:
    """Addresses of the machines of a split run."""

    gpu_host: str = "127.0.0.1"
    """Address at which the GPU side listens; for loaders, that address or its pairing link. Environment: GPU_HOST."""
    cpu_host: str = "127.0.0.1"
    """Address at which a loader listens (`dtrain feed --listen`). Environment: CPU_HOST."""
    port: int = 29500
    """Port of the GPU side; further ranks on its machine take the next ones. Environment: TRAINING_PORT."""
    token_file: str = ""
    """File with the secret that both sides know, in place of that of a pairing link. Runs keep the path only."""

    def __post_init__(self) -> None:
        check_types(self, "network")
        between("network.port", self.port, 1, 65535)


@dataclass(kw_only=True)
class FeedConfig:
    """Batches from loaders on other machines (`dtrain serve`, `dtrain feed`). A batch may take `run.deadline`."""

    memory_mb: int = 1024
    """Batches that may be on their way to the GPU side or wait there at any time, for each rank."""
    loader_memory_mb: int = 512
    """Batches that one loader worker may hold ready."""
    max_steps_ahead: int = 4096
    """Steps that may be prepared ahead of training, if memory allows. How many are is found out while training."""
    compression: Literal["auto", "always", "off"] = "auto"
    """Compress while it makes the link measured faster, whenever it makes batches smaller, or never."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """When a dataset raises on a sample: end training naming it, or train without it and write it into the ledger."""
    wait_for_loaders: float = 86400.0
    """Seconds that training waits while no loader is connected."""
    wait_for_server: float = 3600.0
    """Seconds that a loader tries to reach the GPU side before it gives up."""
    shared_memory: bool = True
    """Let a loader on the GPU side's own machine hand over batches in shared memory."""
    ca_file: str = ""
    """File of certificate authorities that vouch for a tunnel or proxy (wss://), in place of those of the system."""
    checkpoints_home: Literal["auto", "on", "off"] = "auto"
    """Checkpoints and metrics travel to the loader, below its `run.root`. auto: if the GPU side is another machine."""
    max_checkpoint_mb: int = 65536
    """The largest checkpoint that one side takes from the other."""
    cache: Literal["off", "memory", "disk"] = "off"
    """Keep samples on the GPU side, so that later epochs need no transfer. disk: below `run.root`, for a resume too."""
    cache_mb: int = 4096
    """Room that `cache` may take, for each rank. Shuffled samples are kept only if all of them fit."""

    def __post_init__(self) -> None:
        check_types(self, "feed")
        at_least("feed.memory_mb", self.memory_mb, 1)
        at_least("feed.loader_memory_mb", self.loader_memory_mb, 1)
        at_least("feed.max_steps_ahead", self.max_steps_ahead, 1)
        at_least("feed.max_checkpoint_mb", self.max_checkpoint_mb, 1)
        at_least("feed.cache_mb", self.cache_mb, 1)
        positive("feed.wait_for_loaders", self.wait_for_loaders)
        positive("feed.wait_for_server", self.wait_for_server)


@dataclass(kw_only=True)
class StrategyConfig:
    """How one step runs on many devices. `strategy: ddp` is short for `strategy: {name: ddp}`."""

    name: str = "auto"
    """single, dp, ddp, zero1, zero2, zero3, fsdp, deepspeed, accelerate, horovod, mpi; auto fits what it finds."""
    backend: str = "auto"
    """How ranks talk: nccl, gloo, mpi (our own, under mpirun), or auto for the one that fits the device."""
    bucket_mb: float = 25.0
    """ddp, zero1: gradients travel in buckets of this size while the backward pass goes on."""
    static_graph: bool = False
    """ddp, zero1: promise that every step uses the same parameters in the same way; allows more overlap."""
    find_unused_parameters: bool = False
    """ddp, zero1, horovod: some parameters get no gradient in some steps. Costs a look over the graph each step."""
    compression: Literal["none", "fp16", "bf16", "int8", "powersgd", "batched_powersgd"] = "none"
    """ddp, horovod, mpi: how gradients are made smaller. int8: mpi only. All but none change the training slightly."""
    powersgd_rank: int = 4
    """Rank of PowerSGD's approximation: more is closer and larger."""
    powersgd_start_step: int = 100
    """Steps with whole gradients before PowerSGD begins; the early ones matter most."""
    powersgd_warm_start: bool = True
    """Start each approximation from the one before it."""
    cpu_offload: bool = False
    """zero2, zero3, fsdp, deepspeed: keep parameters, gradients and optimizer state in CPU memory."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """deepspeed: what is divided: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too. Left out: 2."""
    deepspeed_config: str | None = None
    """deepspeed: a DeepSpeed JSON file of your own. What it says must not contradict this config."""
    plugin: Literal["none", "fsdp", "deepspeed"] = "none"
    """accelerate: which of its plugins to use. `accelerate launch` may choose one too."""
    sync_batchnorm: bool = False
    """Batch norm over the samples of all ranks: exactly as on one device, for more traffic."""

    def __post_init__(self) -> None:
        check_types(self, "strategy")
        positive("strategy.bucket_mb", self.bucket_mb)
        at_least("strategy.powersgd_rank", self.powersgd_rank, 1)
        at_least("strategy.powersgd_start_step", self.powersgd_start_step, 2)


@dataclass(kw_only=True)
class CheckpointConfig:
    """When the state of the run is saved, and which saves are kept."""

    every_epochs: int = 1
    """Epochs between two checkpoints; 0 saves only at the end."""
    every_steps: int | None = None
    """Also save every so many steps."""
    keep: int = 2
    """How many of the newest checkpoints stay."""
    keep_best: bool = True
    """Also keep the best one by `monitor`."""
    monitor: str = "val_loss"
    """The metric that decides which checkpoint is best."""
    mode: Literal["min", "max"] = "min"
    """Whether small or large values of `monitor` are good."""
    background: bool = True
    """Write in a thread while training goes on; the loop pays only for a copy in memory."""
    resume: str = "never"
    """never; auto: continue from the newest good checkpoint if there is one; or the path of a run or checkpoint."""

    def __post_init__(self) -> None:
        check_types(self, "checkpoint")
        at_least("checkpoint.every_epochs", self.every_epochs, 0)
        at_least("checkpoint.every_steps", self.every_steps, 1)
        at_least("checkpoint.keep", self.keep, 1)


@dataclass(kw_only=True)
class EarlyStoppingConfig:
    """Stop when a metric no longer improves."""

    enabled: bool = False
    """Whether to stop early at all."""
    monitor: str = "val_loss"
    """The metric watched after each validation."""
    mode: Literal["min", "max"] = "min"
    """Whether small or large values are good."""
    patience: int = 5
    """Validations without improvement before stopping."""
    min_delta: float = 0.0
    """Smallest change that counts as an improvement."""

    def __post_init__(self) -> None:
        check_types(self, "early_stopping")
        at_least("early_stopping.patience", self.patience, 1)
        at_least("early_stopping.min_delta", self.min_delta, 0)


@dataclass(kw_only=True)
class TrackingConfig:
    """Experiment trackers, beside the JSONL events that every run writes."""

    trackers: list[str] = field(default_factory=list)
    """Any of tensorboard, wandb."""
    project: str = "distributed_training"
    """Project in W&B."""
    entity: str | None = None
    """Team or user in W&B."""
    group: str | None = None
    """Group of runs in W&B."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run in W&B."""
    mode: Literal["online", "offline"] = "online"
    """offline keeps W&B data on disk until `wandb sync`."""
    upload_checkpoints: bool = False
    """Upload each checkpoint kept to W&B as an artifact."""

    def __post_init__(self) -> None:
        check_types(self, "tracking")


@dataclass(kw_only=True)
class RunConfig:
    """Where a run lives and how its process is set up."""

    root: str = "runs"
    """Folder of all runs."""
    name: str | None = None
    """Folder of this run inside `root`. Left out: model, dataset and time."""
    allocator: Literal["auto", "default"] = "auto"
    """auto: keep freed memory in the process when training on the CPU (1.3 to 1.6 times faster on large models)."""
    threads: int | None = None
    """CPU threads of torch. Left out: torch decides."""
    progress: Literal["auto", "bar", "plain", "off"] = "auto"
    """What is shown while training. auto: bars on a terminal or in a notebook, plain lines elsewhere."""
    deadline: float = 300.0
    """Seconds that any wait may last before it becomes an error."""
    stop_after_steps: int | None = None
    """End the training after this many optimizer steps in all, with a checkpoint to go on from."""
    cache: str = "~/.cache/distributed_training"
    """Folder where what was measured of a model on a GPU is remembered, for the next training."""

    def __post_init__(self) -> None:
        check_types(self, "run")
        self.root = os.path.expanduser(self.root)
        at_least("run.threads", self.threads, 1)
        at_least("run.stop_after_steps", self.stop_after_steps, 1)
        positive("run.deadline", self.deadline)


@dataclass(kw_only=True)
class RecordConfig:
    """A record of every step, to compare two trainings by. `dtrain verify` sets these."""

    folder: str | None = None
    """Folder that gets the loss, the samples and the weights of every step. Slow: weights are gathered each step."""
    against: str | None = None
    """Folder of an earlier record: weights are compared with those in it, and only the differences are kept."""
    nudge: bool = False
    """Change the last bit of the starting weights at random: shows how much the training makes of rounding."""

    def __post_init__(self) -> None:
        check_types(self, "record")
