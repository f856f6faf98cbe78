"""`dtrain feed`."""

from __future__ import annotations

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
    end_with_parent: Annotated[bool, typer.Option("--end-with-parent", hidden=True)] = False,
    verbose: Verbose = False,
) -> None:
    """Load batches for a training elsewhere: the CPU side of a split.

    Give it the same config as `dtrain serve`. Any number of these, on any machines that have the data, may work for one
    training, and come and go as they like. It ends when the training does.

    **Examples**

    `dtrain feed config.yaml --to 'dtrain://TOKEN@192.168.1.100:29500?fp=...' --workers 8`

    `dtrain feed config.yaml`  (the GPU side is on this machine)
    """
    config = config_from(words)
    show_logs(verbose)
    from distributed_training.runtime.signals import end_with_parent as end_with
    from distributed_training.split.feeding import feeding_from
    from distributed_training.split.listening import links_to

    if end_with_parent:
        end_with()
    links = links_to(to, None, None, config)
    feeding = feeding_from(config, len(links))
    if workers is not None:
        feeding.workers = workers
    feeding.run(links, config)
