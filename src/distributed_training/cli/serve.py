"""`dtrain serve`."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distributed_training.cli.settings import Words, config_from, show_logs, split_words, words_to_resume
from distributed_training.cli.train import Resume, Verbose
from distributed_training.cli.validate import Which
from distributed_training.config.errors import ConfigError

if TYPE_CHECKING:
    from distributed_training.split.serving import Serving
    from distributed_training.split.tunnelling import Tunnelling
    from distributed_training.training import TrainingResult


def serve(
    words: Words = None,
    resume: Resume = None,
    allow: Annotated[
        str | None, typer.Option(help="The only hosts that may connect, separated by commas.", metavar="HOST,...")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="`training`, or, with a run's folder instead of a config, `validation` or `inference`.")
    ] = "training",
    checkpoint: Which = "best",
    tunnel: Annotated[
        str | None,
        typer.Option(
            help="Be reached through a tunnel: `auto`, `cloudflared`, `ngrok`, `ngrok:tcp`, `ssh:user@host`, or the "
            "URL of one that leads to `network.port` already.",
            metavar="TUNNEL",
        ),
    ] = None,
    connect: Annotated[
        str | None,
        typer.Option(help="Dial the loader that printed this link (`dtrain feed --listen`).", metavar="LINK"),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Train on batches that other machines load, or validate or predict for them: the GPU side of a split.

    It listens at `network.gpu_host` and `network.port` and prints a pairing link for `dtrain feed`. The data itself is
    needed only there. On several GPUs start it by `dtrain launch` or torchrun. `--checkpoint` is for the other modes.

    **Examples**

    `dtrain serve config.yaml network.gpu_host=192.168.1.100`  (or 0.0.0.0: all addresses of this machine)

    `dtrain serve config.yaml --allow 192.168.1.200`

    `dtrain serve --resume auto`  (after an interruption; loaders that still run come back by themselves)

    `dtrain serve config.yaml --tunnel cloudflared`  (behind a firewall, or in a notebook's shell)

    `dtrain serve config.yaml --connect LINK`  (the loader listens: `dtrain feed config.yaml --listen`)

    `dtrain launch --nproc 4 -- serve config.yaml strategy=ddp`

    `dtrain serve runs/NAME --mode validation`  (clients: `dtrain validate --to`, `CPULoader.run_validation`)
    """
    hosts = allow.split(",") if allow else None
    if connect is not None and (tunnel or allow or mode != "training"):
        raise typer.BadParameter("--connect dials a loader for training: --tunnel, --allow and --mode are not for that")
    if mode != "training":
        _serve_clients(words, mode, checkpoint, hosts, tunnel, verbose)
        return
    config = config_from(words_to_resume(words, resume))
    show_logs(verbose)
    from distributed_training.split.serving import Serving

    with Serving(config, allow=hosts, tunnelling=_tunnelling(tunnel), connect=connect) as serving:
        serving.announce()
        result = serving.train()
    say_goodbye_with_figures(serving, result, "serve")


def _tunnelling(tunnel: str | None) -> Tunnelling | None:
    if tunnel is None:
        return None
    from distributed_training.split.tunnelling import Tunnelling

    return Tunnelling(tunnel)


def _serve_clients(
    words: list[str] | None, mode: str, checkpoint: str, allow: list[str] | None, tunnel: str | None, verbose: bool
) -> None:
    from distributed_training.cli.trained import load_model
    from distributed_training.split.listening import Address
    from distributed_training.split.service import serve_clients

    path, overrides = split_words(words)
    if path is None or mode not in ("validation", "inference"):
        raise ConfigError(
            f"--mode {mode}: training with a config, or validation or inference with a run's folder: "
            "dtrain serve runs/NAME --mode validation"
        )
    show_logs(verbose)
    with load_model(Path(path), overrides, checkpoint) as (trainer, used):
        typer.echo(f"{mode} with {used}")
        network, tunnelling = trainer.config.network, _tunnelling(tunnel)
        if tunnelling is None:
            done = serve_clients(trainer, mode, Address(network.gpu_host, network.port, allow=allow))
        else:
            command = f"dtrain {'validate' if mode == 'validation' else 'predict'} CONFIG --to"
            with closing(tunnelling):
                done = serve_clients(
                    trainer,
                    mode,
                    tunnelling.address(network.port, allow=allow),
                    on_listening=lambda listening: tunnelling.lead_to(listening, "clients", command),
                )
    typer.echo(
        f"served {done.tasks} clients: {done.samples:,} samples, {done.received / 1e6:,.1f} MB received, "
        f"{done.sent / 1e6:,.1f} MB of results sent"
    )


def say_goodbye_with_figures(serving: Serving, result: TrainingResult, command: str) -> None:
    """The last lines of a training whose batches came from loaders: also what held it up."""
    from distributed_training.cli.ending import exit_code, say_goodbye
    from distributed_training.split.screen import summary

    if serving.leads:
        lines = summary(serving.listening.figures, serving.listening.world.size)
        say_goodbye(result, serving.config.training.epochs, command, lines)
    elif result.status == "interrupted":
        sys.exit(exit_code(result))
