"""`dtrain feed`."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from distributed_training.cli.settings import Words, config_from, show_logs
from distributed_training.cli.train import Verbose


def feed(
    words: Words = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="The pairing link that `dtrain serve` prints; left out, `network.gpu_host` and `network.port`.",
            metavar="LINK",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that load; left out, `data.num_workers`, at least one a rank.", min=1)
    ] = None,
    listen: Annotated[
        bool,
        typer.Option(
            "--listen",
            help="Await the GPU side's call at `network.cpu_host` and `network.port` instead of calling it; prints a "
            "link for `dtrain serve --connect`.",
        ),
    ] = False,
    tunnel: Annotated[
        str | None,
        typer.Option(
            help="With --listen: be called through a tunnel: `auto`, `cloudflared`, `ngrok`, `ngrok:tcp`, "
            "`ssh:user@host`, or the URL of one that leads to `network.port` already.",
            metavar="TUNNEL",
        ),
    ] = None,
    on_ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Put the workers on the CPUs of a Ray cluster, spread over its nodes, which have the data."
        ),
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            help="With --ray: the cluster, `HOST:PORT` or `ray://HOST:PORT`; left out, that of RAY_ADDRESS or of this "
            "machine.",
            metavar="ADDRESS",
        ),
    ] = None,
    loaders: Annotated[
        int | None, typer.Option(help="With --ray: how many workers; left out, as for --workers.", min=1)
    ] = None,
    end_with_parent: Annotated[bool, typer.Option("--end-with-parent", hidden=True)] = False,
    verbose: Verbose = False,
) -> None:
    """Load batches for a training elsewhere: the CPU side of a split.

    Give it the same config as `dtrain serve`. Any number of these, on any machines that have the data, may work for one
    training, and come and go as they like. It ends when the training does.

    **Examples**

    `dtrain feed config.yaml --to 'dtrain://TOKEN@192.168.1.100:29500?fp=...' --workers 8`

    `dtrain feed config.yaml`  (the GPU side is on this machine)

    `dtrain feed config.yaml --listen network.cpu_host=0.0.0.0`  (the GPU side dials: `dtrain serve --connect LINK`)

    `dtrain feed config.yaml --to LINK --ray --loaders 16`  (on the CPUs of a Ray cluster)
    """
    if on_ray and (listen or workers is not None):
        raise typer.BadParameter("--ray has workers that call the GPU side: give --loaders, not --workers or --listen")
    if not on_ray and (address is not None or loaders is not None):
        raise typer.BadParameter("--address and --loaders are for --ray; --workers is for this machine")
    if listen and to is not None:
        raise typer.BadParameter("--listen awaits the GPU side's call, --to calls it: give one of them")
    if tunnel is not None and not listen:
        raise typer.BadParameter("--tunnel is for --listen; a GPU side behind a tunnel is called by --to LINK")
    config = config_from(words)
    show_logs(verbose)
    from distributed_training.runtime.signals import end_with_parent as end_with
    from distributed_training.split.feeding import feeding_from
    from distributed_training.split.home_listening import HomeListening
    from distributed_training.split.listening import links_to

    if end_with_parent:
        end_with()
    links = [] if listen else links_to(to, None, None, config)
    if on_ray:
        from distributed_training.launch.ray_cluster import connected
        from distributed_training.launch.ray_feed import RayFeed

        with connected(address) as ray:
            RayFeed(ray, config, links, loaders or max(config.data.num_workers, len(links), 1)).run()
        return
    feeding = feeding_from(config, len(links))
    if workers is not None:
        feeding.workers = workers
    if not listen:
        feeding.run(links, config)
        return
    with closing(HomeListening(config, tunnel=tunnel)) as listening:
        listening.announce()
        feeding.run(listening.door, config)
