"""`GPUTrainer`: the side that has the model. Batches come from `CPULoader`s, here or on other machines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.optim import Optimizer

from distributed_training.config import Config
from distributed_training.config.load import config_from_environment
from distributed_training.data.device_transform import Transform
from distributed_training.feed.pairing import PairingLink, decode_token, is_loopback
from distributed_training.runtime.errors import ConfigError
from distributed_training.split.fed_training import train_from_feed
from distributed_training.split.listening import Address, Listening, link_to_loader, listen
from distributed_training.split.screen import summary
from distributed_training.training import Callback, Trainer, TrainingResult
from distributed_training.training.forms import Criterion

if TYPE_CHECKING:
    from distributed_training.feed.turns import ServiceFigures

VARIABLES = ("GPU_HOST", "CPU_HOST", "TRAINING_PORT")
"""Of the environment, beside those of all settings."""


class GPUTrainer:
    """Trains a model on batches that other machines load.

        trainer = GPUTrainer(port=29500, device="cuda")
        trainer.setup_model(model, learning_rate=1e-3)
        trainer.start_training(cpu_host="192.168.1.200")

    Loaders on this machine need nothing but the port. For those elsewhere it prints a pairing link, which holds
    address, token and certificate fingerprint.
    """

    def __init__(
        self,
        port: int | None = None,
        device: str | None = None,
        *,
        host: str | None = None,
        token: str | None = None,
        config: Config | None = None,
    ) -> None:
        """
        Args:
            port: left out, `network.port` (environment: TRAINING_PORT).
            device: auto, cpu, cuda, cuda:1; left out, `training.device`.
            host: address to listen at, 0.0.0.0 for all; left out, `network.gpu_host` (environment: GPU_HOST), or all
                where `start_training` names a `cpu_host` that is not this machine.
            token: a secret that both sides know, in place of one in a pairing link; at least 22 characters, such as
                `secrets.token_urlsafe(24)` makes.
            config: all other settings; left out, the defaults with a constant learning rate.
        """
        if config is None:
            constant = {"training": {"schedule": "constant", "warmup_epochs": 0}}
            config = config_from_environment(constant, "GPUTrainer", VARIABLES)
        self.config, self.device = config, device
        self._port = config.network.port if port is None else port
        self._host = host
        self._token = decode_token(token) if token is not None else None
        self._loader: PairingLink | None = None
        self._trainer: Trainer | None = None
        self._listening: Listening | None = None

    def setup_model(
        self,
        model: nn.Module,
        learning_rate: float | None = None,
        *,
        optimizer: Optimizer | None = None,
        criterion: Criterion | None = None,
        callbacks: Sequence[Callback] = (),
        metrics: Mapping[str, Any] | None = None,
        run_dir: str | Path | bool | None = None,
        strategy: str | None = None,
        device_transform: Transform | None = None,
    ) -> None:
        """Say what to train: with the config's optimizer at this learning rate, or with one of your own.

        `device_transform` is applied to every batch here, on the device, so that samples can travel as uint8 or
        encoded. The other arguments are those of `Trainer`, too.
        """
        if optimizer is not None and learning_rate is not None:
            raise ConfigError("setup_model: give learning_rate or optimizer, not both; the optimizer has a rate itself")
        if self._trainer is not None:
            self._trainer.close()
        config = self.config
        if learning_rate is not None:
            config = config.replace(**{"training.lr": learning_rate})
        self._trainer = Trainer(
            model,
            optimizer,
            criterion=criterion,
            device=self.device,
            config=config,
            callbacks=callbacks,
            metrics=metrics,
            run_dir=run_dir,
            strategy=strategy,
            device_transform=device_transform,
        )

    @property
    def trainer(self) -> Trainer:
        """The `Trainer` underneath, once there is a model."""
        if self._trainer is None:
            raise ConfigError("there is no model yet: call setup_model(model, learning_rate=...) first")
        return self._trainer

    @property
    def link(self) -> str | None:
        """The pairing link for loaders and clients, while this side listens."""
        return self._listening.link if self._listening is not None else None

    def start_training(
        self,
        cpu_host: str | Iterable[str] | None = None,
        *,
        epochs: int | None = None,
        val_data: Any = None,
        scheduler: Any = None,
        resume: str | Path | None = None,
    ) -> TrainingResult:
        """Wait for loaders, train on what they bring, and return what came of it.

        Args:
            cpu_host: the only address that may connect (or several).
            epochs: left out, the first loader says how many, and else `training.epochs`.
            val_data: held-out data on this machine; left out, that of the loaders, if they have any.
            scheduler: a torch learning-rate scheduler, as for `Trainer.train`.
            resume: never, auto, or the path of a run or checkpoint; left out, `checkpoint.resume`.
        """
        trainer, resume = self.trainer, resume or self._unfinished()
        again = str(resume or self.config.checkpoint.resume) != "never"
        listening = self._listening = listen(self.config, self._address(cpu_host), again=again, epochs=epochs)
        try:
            self._announce(listening)
            given = {"epochs": epochs, "val_data": val_data, "scheduler": scheduler, "resume": resume}
            result = train_from_feed(trainer, listening, **given)
        finally:
            self._listening = None
        if trainer.strategy.rank == 0 and trainer.config.run.progress != "off":
            sys.stderr.write("\n".join(summary(listening.figures, listening.world.size)) + "\n")
        return result

    def connect(
        self,
        link: str | PairingLink,
        *,
        epochs: int | None = None,
        val_data: Any = None,
        scheduler: Any = None,
        resume: str | Path | None = None,
    ) -> TrainingResult:
        """Dial a loader that listens (`CPULoader.listen_for_gpu`, `dtrain feed --listen`), and train on what it brings.

        Args:
            link: the pairing link that it prints.
            epochs: as for `start_training`.
            val_data: as for `start_training`.
            scheduler: as for `start_training`.
            resume: as for `start_training`.
        """
        self._loader = link_to_loader(link)
        try:
            return self.start_training(epochs=epochs, val_data=val_data, scheduler=scheduler, resume=resume)
        finally:
            self._loader = None

    def _unfinished(self) -> str | None:
        """How to resume where nobody says it; None for `checkpoint.resume`."""
        return None

    def start_service(
        self,
        mode: Literal["training", "validation", "inference"] = "training",
        cpu_host: str | Iterable[str] | None = None,
        **options: Any,
    ) -> TrainingResult | ServiceFigures:
        """Serve other machines: train for loaders, or validate or predict for clients, several at a time.

        `training` is `start_training`, with its arguments. The other two go on until Ctrl-C or SIGTERM, or until
        `tasks` clients had all their results.
        """
        if mode == "training":
            return self.start_training(cpu_host, **options)
        from distributed_training.split.service import serve_clients

        def note(listening: Listening) -> None:
            self._listening = listening
            method = {"validation": "run_validation", "inference": "run_inference"}[mode]
            listening.announce("clients", f"CPULoader.{method}(gpu_host=...) with")

        try:
            return serve_clients(self.trainer, mode, self._address(cpu_host), on_listening=note, **options)
        finally:
            self._listening = None

    def close(self) -> None:
        """Leave the other ranks. Not needed at the end of a program."""
        if self._trainer is not None:
            self._trainer.close()

    def _announce(self, listening: Listening) -> None:
        """Say how to connect."""
        listening.announce(command="CPULoader.start_loading(gpu_host=...) with")

    def _address(self, cpu_host: str | Iterable[str] | None) -> Address:
        hosts = None if cpu_host is None else [cpu_host] if isinstance(cpu_host, str) else list(cpu_host)
        host = self._host or self.config.network.gpu_host
        if self._loader is not None:
            return Address(host, self._port, connect=self._loader)
        if self._host is None and hosts and not all(map(is_loopback, hosts)) and is_loopback(host):
            host = "0.0.0.0"
        return Address(host, self._port, self._token, hosts)
