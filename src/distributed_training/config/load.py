"""Layers of settings put together: defaults < file < .env < environment < command line.

This is the only module that reads environment variables for settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed_training.config.check import did_you_mean
from distributed_training.config.config import (
    Config,
    Origin,
    check_key,
    groups,
    known_keys,
    resolve_alias,
    section_types,
    takes_text,
)
from distributed_training.config.errors import ConfigError

# The names users know from other tools; any other setting is DTRAIN_SECTION__KEY.
ENVIRONMENT_NAMES = {
    "GPU_HOST": "network.gpu_host",
    "CPU_HOST": "network.cpu_host",
    "TRAINING_PORT": "network.port",
    "BATCH_SIZE": "training.batch_size",
}
PREFIX = "DTRAIN_"
CONFIG_FILE_VARIABLE = "DTRAIN_CONFIG"
_OF_THE_BACKEND = "DTRAIN_MPI_"  # read by the MPI backend itself, in C++
Layer = tuple[str, dict[str, Any]]


def get_config(path: str | Path | None = None) -> Config:
    """The settings in force here: `path`, or $DTRAIN_CONFIG, or ./config.yaml if there is one, and the environment."""
    return load_config(path or default_file())


def default_file() -> str | None:
    """The config file used when none is named: $DTRAIN_CONFIG, or ./config.yaml if there is one."""
    return os.environ.get(CONFIG_FILE_VARIABLE) or ("config.yaml" if Path("config.yaml").exists() else None)


def load_config(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    dotenv: str | Path = ".env",
) -> Config:
    """Settings from all layers. `overrides` are `key=value` words of the command line."""
    layers: list[Layer] = []
    if path is not None:
        layers.append((str(path), read_yaml(Path(path))))
    layers += environment_layers(read_dotenv(Path(dotenv)), where=f"{dotenv}: ")
    layers += environment_layers(os.environ if environ is None else environ, where="environment: ")
    layers += [("command line", parse_override(word)) for word in overrides]
    return config_from_layers(layers)


def config_from_environment(values: Mapping[str, Any], source: str, also: Collection[str] = ()) -> Config:
    """Given values with the DTRAIN_ variables of the environment over them: so a script can be steered from outside.

    `also` names those of `ENVIRONMENT_NAMES` that count here, too.
    """
    own = {name: value for name, value in os.environ.items() if name.startswith(PREFIX) or name in also}
    return config_from_layers([(source, dict(values)), *environment_layers(own, where="environment: ")])


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, interpolations unresolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `dtrain config init` writes one") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except OmegaConfBaseException as error:
        raise _interpolation_error(error, str(path)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not OmegaConf.is_dict(loaded):
        raise ConfigError(f"{path}: must hold sections such as `training:`, not {type(loaded).__name__}")
    return OmegaConf.to_container(loaded, resolve=False)  # type: ignore[return-value]


def read_dotenv(path: Path) -> dict[str, str]:
    """The variables of a .env file; an absent file holds none."""
    variables: dict[str, str] = {}
    if not path.is_file():
        return variables
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ConfigError(f"{path}: line {number} is not NAME=value: {line.strip()!r}")
        value = value.strip()
        quoted = re.fullmatch(r"""(['"])(.*)\1(\s+#.*)?""", value)
        variables[name.strip()] = quoted[2] if quoted else re.split(r"(?:^|\s)#", value)[0].strip()
    return variables


def export_dotenv(path: str | Path = ".env") -> None:
    """Give libraries the variables of .env that are not settings of ours (WANDB_API_KEY, ...), unless already set."""
    for name, value in read_dotenv(Path(path)).items():
        if name not in ENVIRONMENT_NAMES and not name.startswith(PREFIX):
            os.environ.setdefault(name, value)


def secret(name: str, dotenv: str | Path = ".env") -> str | None:
    """A secret of another service, from the environment or .env: no setting, kept in no run and shown nowhere."""
    return os.environ.get(name) or read_dotenv(Path(dotenv)).get(name) or None


def settings_in_environment(dotenv: str | Path = ".env") -> dict[str, str]:
    """The variables of .env and of the environment that are settings: what another machine needs to have the same."""
    variables = {**read_dotenv(Path(dotenv)), **os.environ}
    return {
        name: value
        for name, value in variables.items()
        if name in ENVIRONMENT_NAMES
        or (name.startswith(PREFIX) and name != CONFIG_FILE_VARIABLE and not name.startswith(_OF_THE_BACKEND))
    }


def variable(name: str, dotenv: str | Path = ".env") -> str | None:
    """The value of any variable, for a user who asks to send it along; from the environment or .env."""
    return os.environ.get(name, read_dotenv(Path(dotenv)).get(name))


def environment_layers(variables: Mapping[str, str], where: str) -> list[Layer]:
    """One layer for each variable that is a setting."""
    layers: list[Layer] = []
    for name, value in sorted(variables.items()):
        if name in ENVIRONMENT_NAMES:
            layers.append((where + name, nest(ENVIRONMENT_NAMES[name], value)))
        elif name.startswith(PREFIX) and name != CONFIG_FILE_VARIABLE and not name.startswith(_OF_THE_BACKEND):
            key = _key_of_variable(name, where)
            layers.append((where + name, nest(key, _parse_value(value, key))))
    return layers


def parse_override(word: str) -> dict[str, Any]:
    """`training.lr=0.1` as a nested mapping."""
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"command line: {word!r} is not key=value, such as training.epochs=3")
    return nest(key, _parse_value(value, key))


def nest(key: str, value: Any) -> dict[str, Any]:
    """A dotted key and its value as nested dicts."""
    nested: Any = value
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return nested


def config_from_layers(layers: Sequence[Layer]) -> Config:
    """Merge layers in order, check every key and value, and remember who said what."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    origins: dict[str, list[Origin]] = {}
    merged: Any = OmegaConf.create(Config().to_dict())  # so that ${training.epochs} finds a default too
    for source, values in layers:
        values = _normalise(values, source)
        for key, value in _flatten(values):
            try:
                check_key(key)
            except ConfigError as error:
                raise ConfigError(f"{source}: {error}") from None
            origins.setdefault(key, []).append(Origin(source, value))
        try:
            merged = OmegaConf.merge(merged, OmegaConf.create(values))
        except OmegaConfBaseException as error:
            raise _interpolation_error(error, source) from None
    try:
        plain: Any = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None)).split("[")[0]
        raise _interpolation_error(error, origins[key][-1].source if key in origins else "config") from None
    return _build(plain, origins)


def _build(plain: dict[str, Any], origins: dict[str, list[Origin]]) -> Config:
    sections = {}
    for name, section in section_types().items():
        try:
            sections[name] = section(**plain.get(name) or {})
        except ConfigError as error:
            key = str(error).split("=")[0].split("[")[0]
            source = origins[key][-1].source + ": " if key in origins else ""
            raise ConfigError(source + str(error)) from None
    config = Config(**sections)
    defaults = Config()
    for key in {*known_keys(), *origins}:
        config._origins[key] = [Origin("default", defaults.get(key)), *origins.get(key, [])]
    return config


def _normalise(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Open shorthands (`strategy: single`) and aliases (`learning_rate`)."""
    result: dict[str, Any] = {}
    for name, section in values.items():
        if name in section_types() and not isinstance(section, Mapping):
            if section is None:
                continue
            if "name" not in section_types()[name].__dataclass_fields__:  # type: ignore[attr-defined]
                raise ConfigError(f"{source}: {name} must be a section with keys, not {section!r}")
            section = {"name": section}
        if isinstance(section, Mapping):
            renamed: dict[str, Any] = {}
            for k, v in section.items():
                key = resolve_alias(f"{name}.{k}").partition(".")[2]
                if key in renamed:
                    raise ConfigError(f"{source}: {name}.{key} is given under two names; keep one")
                if f"{name}.{key}" in groups() and not isinstance(v, Mapping):
                    if v is None:
                        continue
                    raise ConfigError(f"{source}: {name}.{key} must be a section with keys, not {v!r}")
                renamed[key] = v
            section = renamed
        result[str(name)] = section
    return result


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, key + ".")
        elif not (isinstance(value, Mapping) and key in groups()):
            yield key, value


def literal(value: Any) -> Any:
    """Resolved settings, escaped so that merging them again does not take a `${` in some text for an interpolation."""
    if isinstance(value, dict):
        return {k: literal(v) for k, v in value.items()}
    if isinstance(value, list):
        return [literal(v) for v in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _parse_value(text: str, key: str) -> Any:
    """Text as YAML reads it: numbers, true, null, [1, 2]; only text where the setting is text."""
    from omegaconf import OmegaConf

    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]  # type: ignore[index,call-overload]
    except Exception:  # not YAML: the text itself, and the type check judges it
        return text
    return parsed if parsed is None or isinstance(parsed, str) or not takes_text(key) else text


def _key_of_variable(name: str, where: str) -> str:
    key = name.removeprefix(PREFIX).lower().replace("__", ".")
    if key in section_types() or "." in key:
        return key
    near = [k for k in known_keys() if k.replace(".", "_") == key]
    hint = f"; did you mean {PREFIX}{near[0].upper().replace('.', '__')}?" if near else ""
    raise ConfigError(f"{where}{name} is not a setting; they are named {PREFIX}SECTION__KEY{hint}")


def _interpolation_error(error: Exception, source: str) -> ConfigError:
    """One line from OmegaConf's several: whose setting it is, what is wrong, and the nearest key there is."""
    message = str(error).splitlines()[0]
    missing = re.search(r"Interpolation key '(.+)' not found", message)
    near = did_you_mean(missing[1], known_keys()) if missing else ""
    return ConfigError(f"{source}: {getattr(error, 'full_key', None) or 'settings'}: {message}{near}")
