"""`CPULoader`: the side that has the data. It loads and preprocesses batches for a `GPUTrainer`, here or elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

from distributed_training.config import Config
from distributed_training.config.load import config_from_environment
from distributed_training.data import Dataset, Loader, Plan, PreprocessedDataset, as_source
from distributed_training.feed.loader import LoaderFigures
from distributed_training.feed.pairing import PairingLink, decode_token
from distributed_training.feed.tunnels import Tunnel
from distributed_training.runtime.errors import ConfigError, DataError
from distributed_training.split.feeding import Feeding
from distributed_training.split.gpu_trainer import VARIABLES
from distributed_training.split.home_listening import HomeListening
from distributed_training.split.listening import links_to
from distributed_training.split.seen import sample_progress
from distributed_training.split.settings import client_options

Host = str | PairingLink | None
_BATCH = 64  # samples, where nobody says how many


class CPULoader:
    """Loads batches for a GPU side, which says what is needed next.

        loader = CPULoader(num_workers=8)
        loader.setup_dataset(dataset, batch_size=64)
        loader.start_loading(gpu_host="dtrain://...", epochs=10)

    `gpu_host` is the pairing link that the GPU side prints, or an address. Several loaders, on several machines, may
    work for one training, come and go as they like: the training is the same.
    """

    def __init__(self, num_workers: int | None = None, *, config: Config | None = None) -> None:
        """
        Args:
            num_workers: processes that load, each with a connection of its own; left out, one for each CPU.
            config: all other settings; left out, the defaults.
        """
        self.config = config or config_from_environment({}, "CPULoader", VARIABLES)
        self.num_workers = num_workers if num_workers is not None else len(os.sched_getaffinity(0))
        if self.num_workers < 1:
            raise ConfigError(f"num_workers={num_workers}: a loader needs at least one worker")
        self._data: Loader | None = None
        self._held_out: Loader | None = None
        self._preprocess: Callable[..., Any] | None = None

    def setup_dataset(
        self,
        dataset: Any,
        batch_size: int = 64,
        shuffle: bool = True,
        preprocess: Callable[..., Any] | None = None,
        *,
        val_dataset: Any = None,
        seed: int | None = None,
        drop_last: bool = False,
    ) -> None:
        """Say what to load.

        Args:
            dataset: a dataset, a tuple of arrays, or a DataLoader, whose own batch size and order are kept.
            batch_size: samples in one optimizer step, over all GPUs together.
            shuffle: visit the samples in a new order each epoch.
            preprocess: applied to each sample; it may take a second argument `rng`.
            val_dataset: held-out data that is brought after each epoch, for validation; preprocessed, too.
            seed: of the order and of random preprocessing; left out, `training.seed`.
            drop_last: leave out the last, smaller batch of an epoch.
        """
        seed = self.config.training.seed if seed is None else seed
        plan, self._preprocess = Plan(0, batch_size, seed, shuffle, drop_last), preprocess
        self._data = _planned(dataset, plan, preprocess, in_order=False)
        self._held_out = _planned(val_dataset, plan, preprocess, in_order=True) if val_dataset is not None else None

    @property
    def data(self) -> Loader:
        """The data and its plan, once there is some."""
        if self._data is None:
            raise ConfigError("there is no data yet: call setup_dataset(dataset, batch_size=...) first")
        return self._data

    def start_loading(
        self, gpu_host: Host = None, gpu_port: int | None = None, epochs: int | None = None, *, token: str | None = None
    ) -> LoaderFigures:
        """Load until the GPU side says that the training is over.

        Args:
            gpu_host: a pairing link, or an address (also https://NAME or wss://NAME/PATH of a tunnel); left out,
                `network.gpu_host` (environment: GPU_HOST).
            gpu_port: left out, `network.port` (environment: TRAINING_PORT); 443 for a tunnel.
            epochs: how long to train, where the GPU side does not say that itself.
            token: the secret that both sides know, where `gpu_host` is an address off this machine.
        """
        facts = {"epochs": epochs} if epochs is not None else {}
        feeding = Feeding(self.data, self._held_out, self.num_workers, facts)
        return feeding.run(self._links(gpu_host, gpu_port, token), self.config)

    def listen_for_gpu(
        self,
        host: str | None = None,
        port: int | None = None,
        epochs: int | None = None,
        *,
        token: str | None = None,
        tunnel: str | Tunnel | None = None,
    ) -> LoaderFigures:
        """Load for a GPU side that calls, where that is easier than to be called: it prints a pairing link for
        `GPUTrainer.connect` or `dtrain serve --connect`, and ends when the training does.

        Args:
            host: address to listen at, 0.0.0.0 for all; left out, `network.cpu_host` (environment: CPU_HOST).
            port: left out, `network.port` (environment: TRAINING_PORT).
            epochs: how long to train, where the GPU side does not say that itself.
            token: the secret that both sides know; left out, one is made, and kept for the next time.
            tunnel: be called through a tunnel: auto, cloudflared, ngrok, ngrok:tcp, ssh:user@host, the URL of one that
                leads to the port already, or a tunnel from `distributed_training.feed.tunnels`.
        """
        known = decode_token(token) if token is not None else None
        facts = {"epochs": epochs} if epochs is not None else {}
        feeding = Feeding(self.data, self._held_out, self.num_workers, facts)
        with closing(HomeListening(self.config, host, port, known, tunnel)) as listening:
            listening.announce()
            return feeding.run(listening.door, self.config)

    def run_validation(
        self,
        gpu_host: Host = None,
        val_dataset: Any = None,
        *,
        gpu_port: int | None = None,
        token: str | None = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Validate the model of a GPU side in mode `validation`: accuracy, average_loss, per class, confusion matrix.

        Without `val_dataset` it is that of `setup_dataset`; data given here is preprocessed as set up there. For the
        other options and the results see `split.validation.run_validation`.
        """
        from distributed_training.split.validation import run_validation

        data, given = self._samples(val_dataset, batch_size, options), self._link(gpu_host, gpu_port, token)
        with sample_progress(self.config.run.progress) as seen:
            return run_validation(data, given, **{"on_progress": seen, **options})

    def run_inference(
        self,
        gpu_host: Host = None,
        inference_dataset: Any = None,
        *,
        gpu_port: int | None = None,
        token: str | None = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Predict with the model of a GPU side in mode `inference`: predictions, confidences, top-k, in order.

        Options are top_k, return_full_probabilities, confidence_threshold, output and more: see
        `split.inference.run_inference`, also for the results. Data is preprocessed as set up by `setup_dataset`.
        """
        from distributed_training.split.inference import run_inference

        data, given = self._samples(inference_dataset, batch_size, options), self._link(gpu_host, gpu_port, token)
        with sample_progress(self.config.run.progress) as seen:
            return run_inference(data, given, **{"on_progress": seen, **options})

    def _samples(self, data: Any, batch_size: int | None, options: dict[str, Any]) -> Any:
        """What a client sends; fills in the options that this loader knows."""
        size = batch_size or (self._data.plan.batch_size if self._data is not None else _BATCH)
        options |= client_options(self.config, **{"batch_size": size, "num_workers": self.num_workers, **options})
        if data is not None:
            return _planned(data, Plan(0, size, shuffle=False), self._preprocess, in_order=True).dataset
        if self._held_out is None:
            raise ConfigError("there is no held-out data: give it here, or to setup_dataset(..., val_dataset=...)")
        return self._held_out.dataset

    def _link(self, gpu_host: Host, gpu_port: int | None, token: str | None) -> PairingLink:
        links = self._links(gpu_host, gpu_port, token)
        if len(links) > 1:
            raise ConfigError(f"{len(links)} links are those of a training on several GPUs; a service has one")
        return links[0]

    def _links(self, gpu_host: Host, gpu_port: int | None, token: str | None) -> list[PairingLink]:
        return links_to(gpu_host, gpu_port, decode_token(token) if token is not None else None, self.config)


def _planned(data: Any, plan: Plan, preprocess: Callable[..., Any] | None, *, in_order: bool) -> Loader:
    source = as_source(data, plan, every_sample=in_order)
    if not isinstance(source, Loader):
        raise DataError(
            f"{type(data).__name__} can only be iterated, so that no step of it can be loaded twice or elsewhere; "
            "give a dataset with __getitem__ and __len__"
        )
    if preprocess is None:
        return source
    name = f"{getattr(preprocess, '__module__', '')}.{getattr(preprocess, '__qualname__', repr(preprocess))}"
    dataset: Dataset = PreprocessedDataset(source.dataset, preprocess, name=name)
    return Loader(dataset, replace(source.plan, samples=len(dataset)))
