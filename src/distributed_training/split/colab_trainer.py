"""`ColabGPUTrainer`: a GPU side in a notebook, which nobody can reach but through a tunnel."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distributed_training.feed.tunnels import Tunnel
from distributed_training.runtime.run_directory import newest_run
from distributed_training.split.gpu_trainer import GPUTrainer
from distributed_training.split.listening import Address, Listening
from distributed_training.split.tunnelling import Tunnelling
from distributed_training.training import TrainingResult


class ColabGPUTrainer(GPUTrainer):
    """A `GPUTrainer` for notebooks: opens a tunnel, and goes on where a stopped cell has left off.

        trainer = ColabGPUTrainer()
        trainer.setup_model(model, learning_rate=1e-3)
        trainer.start_training_with_tunnel()

    It prints one pairing link for `CPULoader.start_loading(link)` or `dtrain feed --to` at home. The stop button of the
    cell saves and ends the training; to run the cell again goes on, under the same link.
    """

    _kept: tuple[str | Tunnel, Tunnelling] | None = None
    """A tunnel, as it was asked for and as it is: an interrupted training leaves it open for the next one."""
    _tunnelling: Tunnelling | None = None
    """That of the training that runs now."""

    def start_training_with_tunnel(
        self,
        tunnel: str | Tunnel = "auto",
        *,
        epochs: int | None = None,
        val_data: Any = None,
        scheduler: Any = None,
        resume: str | Path | None = None,
    ) -> TrainingResult:
        """Open a tunnel, wait for loaders, train on what they bring.

        Args:
            tunnel: auto, cloudflared, ngrok, ngrok:tcp, ssh:user@host, the URL of one that leads here already, or a
                tunnel from `distributed_training.feed.tunnels`.
            epochs: left out, the first loader says how many, and else `training.epochs`.
            val_data: held-out data in the notebook; left out, that of the loaders, if they have any.
            scheduler: a torch learning-rate scheduler, as for `Trainer.train`.
            resume: never, auto, or the path of a run or checkpoint; left out, the newest training of this model goes on
                if it was not completed.
        """
        _ = self.trainer  # a missing model is said before anything is opened
        if self._kept is None or self._kept[0] != tunnel:
            self.close_tunnel()
            self._kept = tunnel, Tunnelling(tunnel)
            weakref.finalize(self, Tunnelling.close, self._kept[1])  # at the latest when Python ends
        self._tunnelling, keep = self._kept[1], False
        try:
            result = self.start_training(epochs=epochs, val_data=val_data, scheduler=scheduler, resume=resume)
            keep = result.status == "interrupted"
            return result
        except KeyboardInterrupt:
            keep = True  # stopped before there was a loader
            raise
        finally:
            self._tunnelling = None
            if not keep:
                self.close_tunnel()

    def close_tunnel(self) -> None:
        """End the tunnel that an interrupted training has left open for the next one."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[1].close()

    def close(self) -> None:
        """End the tunnel and leave the other ranks. Not needed at the end of a program."""
        self.close_tunnel()
        super().close()

    def _unfinished(self) -> str | None:
        """Goes on by itself, also after `connect`, but not with a training that is complete."""
        trainer = self.trainer
        if trainer.config.checkpoint.resume != "never" or trainer.run_dir is False:
            return None  # it is said there, or there is nothing to go on from
        if trainer.run_dir is not None:
            return "auto"
        run = newest_run(trainer.recorded_config())
        ends = [event for event in run.events() if event["event"] in ("start", "finish")] if run is not None else []
        return None if not ends or ends[-1].get("status") == "completed" else "auto"

    def _address(self, cpu_host: str | Iterable[str] | None) -> Address:
        if self._tunnelling is None:
            return super()._address(cpu_host)
        return self._tunnelling.address(self._port, self._token, cpu_host)

    def _announce(self, listening: Listening) -> None:
        if self._tunnelling is None:
            super()._announce(listening)
            return
        try:
            self._tunnelling.lead_to(listening, command="CPULoader.start_loading(...) or dtrain feed CONFIG --to with")
        except BaseException:
            listening.close(finished=False)
            raise
        self._token = listening.server.link().token  # the next start is to be found under the same link
