"""`dtrain launch --sagemaker`: its options, and what they make of a config."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from distributed_training.config import Config, SageMakerConfig
    from distributed_training.launch.sagemaker.aws import Aws
    from distributed_training.launch.sagemaker.request import Order

_PANEL = "Amazon SageMaker"


def _option(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_PANEL, **more)


On = Annotated[bool, _option("--sagemaker", help="Run as a training job of Amazon SageMaker.")]
InstanceType = Annotated[str | None, _option(help="Kind of machine, such as ml.p4d.24xlarge.")]
Instances = Annotated[int | None, _option(help="How many machines.")]
Role = Annotated[str | None, _option(metavar="ARN", help="IAM role of the job.")]
Image = Annotated[str | None, _option(metavar="URI", help="An image of your own.")]
Framework = Annotated[str | None, _option(help="AWS's image: huggingface or pytorch.")]
FrameworkVersion = Annotated[str | None, _option(help="Version of PyTorch in it.")]
Spot = Annotated[bool, _option("--spot", help="Spare capacity: cheaper, goes on after interruptions.")]
MaxRun = Annotated[str | None, _option(metavar="TIME", help="Longest training: 12h, 2d.")]
MaxWait = Annotated[str | None, _option(metavar="TIME", help="With --spot: longest time in all.")]
Bucket = Annotated[str | None, _option(help="S3 bucket for source, checkpoints and model.")]
Region = Annotated[str | None, _option(help="AWS region.")]
JobName = Annotated[str | None, _option(help="Name of the job.")]
Data = Annotated[
    list[str] | None, _option(metavar="[NAME=]S3-URI", help="Data for the job, in /opt/ml/input/data/NAME.")
]
Checkpoints = Annotated[str | None, _option(metavar="S3-URI", help="Checkpoints of an earlier job, to go on from.")]
Secret = Annotated[
    list[str] | None, _option(metavar="NAME=REF", help="A secret by reference: HF_TOKEN=ssm:/team/hf-token.")
]
NoWait = Annotated[bool, _option("--no-wait", help="Return as soon as the job has started.")]
DryRun = Annotated[bool, _option("--dry-run", help="Show the request and the files; send nothing.")]
Attach = Annotated[str | None, _option(metavar="JOB", help="Follow a job that runs, and bring its model back.")]
Stop = Annotated[str | None, _option(metavar="JOB", help="Ask a job to save and end.")]
# Names of settings that need an extra of ours in the container.
_EXTRAS = {"accelerate": "accelerate", "deepspeed": "deepspeed", "wandb": "wandb", "tensorboard": "tensorboard"}


def refuse_with_sagemaker(**options: object) -> None:
    """Other ways to find machines: SageMaker has its own."""
    from distributed_training.config import ConfigError

    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if given:
        raise ConfigError(f"{given[0]} is not for --sagemaker: --instances and --instance-type say which machines")


def refuse_without_sagemaker(**options: object) -> None:
    """Options of SageMaker's without --sagemaker would do nothing: say so."""
    from distributed_training.config import ConfigError

    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if given:
        raise ConfigError(f"{given[0]} is for --sagemaker: give that too")


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the command line says; None where it says nothing."""

    words: list[str]
    program: list[str]
    """`words` as arguments of Python."""
    settings: Mapping[str, Any]
    """Fields of `sagemaker`, None where not given."""
    job_name: str | None = None
    data: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    env: list[str] = field(default_factory=list)
    nproc: str = "auto"
    max_restarts: int = 0
    deadline: float | None = None
    wait: bool = True
    dry_run: bool = False


def launch_on_sagemaker(wishes: Wishes, command: Any) -> int:
    """Start a job and follow it; the exit code. `command` is the dtrain command in the words, if it is one."""
    from distributed_training.launch.sagemaker.aws import Aws
    from distributed_training.launch.sagemaker.job import describe_order, submit, watch
    from distributed_training.launch.sagemaker.leaks import refuse_secrets_in_words
    from distributed_training.launch.sagemaker.packing import find_source
    from distributed_training.launch.sagemaker.starting import requirements

    config, program, overrides, files = _understood(wishes, command)
    refuse_secrets_in_words(wishes.words)
    settings = _settings(config.sagemaker, wishes)
    aws = Aws(settings.region)
    try:
        order = _order(wishes, aws.region, config, settings, program, overrides)
        runs = Path(config.run.root)
        needs = requirements(_extras(config, order))
        source = find_source(Path.cwd(), needs, settings.exclude, runs, settings.max_source_mb, files)
        _warn(config, order, [*source.files])
        if wishes.dry_run:
            describe_order(aws, order, source, typer.echo)
            return 0
        submit(aws, order, source, typer.echo)
        if not wishes.wait:
            typer.echo(f"  follow it   dtrain launch --sagemaker --region {aws.region} --attach {order.name}")
            return 0
        return watch(aws, order.name, runs, _say, order.longest)
    finally:
        aws.close()


def attach(job: str, region: str | None) -> int:
    """Follow a job that was started before."""
    from distributed_training.launch.sagemaker.job import watch
    from distributed_training.launch.sagemaker.logs import describe

    aws, config = _connected(region)
    try:
        limits = describe(aws, job)["StoppingCondition"]
        longest = limits.get("MaxWaitTimeInSeconds", limits.get("MaxRuntimeInSeconds", 0))
        return watch(aws, job, Path(config.run.root), _say, longest)
    finally:
        aws.close()


def stop(job: str, region: str | None) -> None:
    """Ask a job to end."""
    from distributed_training.launch.sagemaker import job as jobs

    aws, _ = _connected(region)
    try:
        jobs.stop(aws, job, typer.echo)
    finally:
        aws.close()


def _connected(region: str | None) -> tuple[Aws, Config]:
    from distributed_training.cli.settings import config_from
    from distributed_training.launch.sagemaker.aws import Aws

    config = config_from([])
    aws = Aws(region or config.sagemaker.region)
    aws.account()
    return aws, config


def _understood(wishes: Wishes, command: Any) -> tuple[Config, list[str], dict[str, str], list[Path]]:
    """Config, program without settings, settings by key, and files that must travel even where git ignores them."""
    from distributed_training.cli.settings import config_from, split_words
    from distributed_training.config.load import default_file

    if command is None:  # a script or module of the user's
        script = [Path(wishes.words[0])] if wishes.words[0].endswith(".py") else []
        return config_from([]), _as_seen_there(wishes.program, script), {}, script
    parsed = command.make_context(wishes.words[0], list(wishes.words[1:])).params  # refuses unknown options
    words = list(parsed.get("words") or [])
    file, settings = split_words(words)
    config = config_from(words)
    named = file or default_file()
    program, overrides = list(wishes.program), {}
    if wishes.words[0] == "train":
        for word in settings:
            key, _, value = word.partition("=")
            program.remove(word)
            overrides[key] = value
        if named and file is None:
            program.append(named)
    files = [Path(named)] if named else []
    return config, _as_seen_there(program, files), overrides, files


def _as_seen_there(program: list[str], files: list[Path]) -> list[str]:
    """Words with whole paths of this machine made relative: the folder has another place in the container."""
    here = Path.cwd()
    inside = {str(file): str(file.relative_to(here)) for file in files if file.is_relative_to(here)}
    return [inside.get(word, word) for word in program]


def _settings(base: SageMakerConfig, wishes: Wishes) -> SageMakerConfig:
    """The section of the config with what the command line says over it."""
    given = {name: value for name, value in wishes.settings.items() if value is not None}
    channels = dict(base.data)
    for text in wishes.data:
        name, equals, address = text.partition("=")
        channels.update({name: address} if equals and not name.startswith("s3:") else {"data": text})
    references = {**base.secrets, **{name: ref for name, _, ref in (text.partition("=") for text in wishes.secrets)}}
    return dataclasses.replace(base, **given, data=channels, secrets=references)


def _order(
    wishes: Wishes,
    region: str,
    config: Config,
    settings: SageMakerConfig,
    program: list[str],
    overrides: dict[str, str],
) -> Order:
    from distributed_training.launch.sagemaker.request import Order, job_name

    framework = settings.framework
    if framework == "auto":
        framework = "huggingface" if _uses_hugging_face(config) else "pytorch"
    return Order(
        name=wishes.job_name or job_name(program),
        region=region,
        settings=settings,
        framework=framework,
        program=program,
        overrides=overrides,
        environment=_environment(wishes.env),
        nproc=wishes.nproc,
        max_restarts=wishes.max_restarts,
        deadline=wishes.deadline,
    )


def _environment(env: list[str]) -> dict[str, str]:
    """Variables of the job: our settings from this environment, and what --env names."""
    from distributed_training.config import ConfigError
    from distributed_training.config.load import settings_in_environment, variable
    from distributed_training.launch.sagemaker.leaks import is_secret_name

    own = ("DTRAIN_SAGEMAKER__", "DTRAIN_RUN__ROOT")
    values = {name: value for name, value in settings_in_environment().items() if not name.startswith(own)}
    for text in env:
        name, equals, value = text.partition("=")
        found = value if equals else variable(name)
        if found is None:
            raise ConfigError(f"--env {name}: there is no such variable here; write --env {name}=VALUE")
        if is_secret_name(name):
            warning = f"whoever may describe the job can read {name}; --secret {name}=ssm:/NAME keeps it hidden"
            typer.echo(f"warning: {warning}", err=True)
        values[name] = found
    return values


def _uses_hugging_face(config: Config) -> bool:
    return "huggingface" in (config.model.name, config.data.dataset)


def _extras(config: Config, order: Order) -> list[str]:
    """The extras that the container needs for this config."""
    from distributed_training.config import ConfigError
    from distributed_training.launch.sagemaker.starting import known_extras

    known = known_extras()
    wrong = [name for name in order.settings.extras if known and name not in known]
    if wrong:
        raise ConfigError(f"sagemaker.extras: {wrong[0]!r} is no extra of distributed-training ({', '.join(known)})")
    names = [config.strategy.name, config.strategy.plugin, *config.tracking.trackers]
    wanted = [*order.settings.extras, *(_EXTRAS[name] for name in names if name in _EXTRAS)]
    if _uses_hugging_face(config) and "hf" in known:
        wanted.append("hf")
    if order.settings.secrets:
        wanted.append("sagemaker")
    return wanted


def _warn(config: Config, order: Order, packed: list[Path]) -> None:
    """What will probably go wrong there."""
    root, here = Path(config.data.root), Path.cwd()
    if not order.settings.data and root.exists() and "data.root" not in order.overrides:
        inside = root.resolve().relative_to(here) if root.resolve().is_relative_to(here) else None
        if inside is None or not any(file.is_relative_to(inside) for file in packed):
            typer.echo(
                f"warning: data.root={root} is here and does not travel with the source; copy it to S3 and give "
                "--data s3://BUCKET/FOLDER",
                err=True,
            )
    online = "wandb" in config.tracking.trackers and config.tracking.mode == "online"
    if online and "WANDB_API_KEY" not in {*order.settings.secrets, *order.environment}:
        typer.echo("warning: tracking by wandb needs a key there: --secret WANDB_API_KEY=ssm:/NAME", err=True)


def _say(text: str) -> None:
    typer.echo(text)
    sys.stdout.flush()
