"""Dockerfile, compose.yaml and the targets of make that use them fit together, and are as good files of their kind are.

No Docker is needed. tests/integration/test_compose.py runs what the services run.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.compose import FILE, ROOT, VARIABLE, entry_point, services, stages

from distributed_training.config.load import load_config

IMAGES = ("gpu", "cpu")


def program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def script(name: str) -> Any:
    """A program of docker/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docker" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_linter_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run([program("hadolint"), "Dockerfile"], cwd=ROOT, capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (0, "")


def test_compose_file_is_one_by_the_specification() -> None:
    check = [program("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(FILE)]
    done = subprocess.run(check, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("docker") is None, reason="asks Docker itself, where there is one")
def test_compose_accepts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    docker = ["docker", "compose"]
    if subprocess.run([*docker, "version"], capture_output=True).returncode:
        pytest.skip("docker has no compose here")
    monkeypatch.setenv("FEED_TOKEN", "x" * 32)
    for files in ([], ["-f", "compose.yaml", "-f", "docker/compose.cpu.yaml"]):
        done = subprocess.run(
            [*docker, *files, "--profile", "*", "config", "-q"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_not_root_and_holds_no_compiler_of_python_packages(image: str) -> None:
    lines = stages()[image].splitlines()

    assert [line for line in lines if line.startswith("USER ")] == ["USER ${UID}"]
    assert "ARG UID=1000" in lines
    assert not re.search(r"apt-get install[^&]*\b(g\+\+|build-essential|python3-pip|git)\b", stages()[image])
    assert lines.index("WORKDIR /workspace") < lines.index("USER ${UID}") < lines.index('ENTRYPOINT ["dtrain"]')


def test_the_image_for_gpus_is_the_last_stage_and_of_nvidia() -> None:
    text = (ROOT / "Dockerfile").read_text()

    assert list(stages())[-1] == "gpu"
    assert re.search(r"^FROM nvidia/cuda:\$\{CUDA_VERSION\}-\$\{CUDA_FLAVOUR\}-ubuntu24\.04 AS gpu$", text, re.M)


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert copied
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
        assert name.split("/")[0] in kept, f"{name} is left out by .dockerignore"
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()  # so .env and runs never reach an image


def test_stages_that_are_named_exist() -> None:
    text = (ROOT / "Dockerfile").read_text()
    named = re.findall(r"(?:--from=|,from=)([\w-]+)", text)
    assert named
    assert set(named) <= stages().keys()
    assert {service["build"]["target"] for service in services().values()} == set(IMAGES)


def test_targets_of_make_name_what_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    rules = {m[1]: m[2] for m in re.finditer(r"^(docker[\w-]*):[^\n]*\n((?:\t.*\n)+)", makefile, re.MULTILINE)}
    assert {"docker", "docker-gpu", "docker-ddp", "docker-benchmark"} <= rules.keys()
    recipes = "".join(rules.values())
    assert set(re.findall(r"--target (\S+)", recipes)) == set(IMAGES)
    profiles = {profile for service in services().values() for profile in service["profiles"]}
    assert set(re.findall(r"--profile (\S+)", recipes)) <= profiles
    assert set(re.findall(r" run (?:--\S+ )*([\w-]+)", recipes)) <= services().keys()


@pytest.mark.parametrize("name", services())
def test_the_settings_of_a_service_are_known(name: str) -> None:
    variables = {key: str(value) for key, value in services()[name].get("environment", {}).items()}
    path = variables.pop("DTRAIN_CONFIG", None)

    config = load_config(str(ROOT / path) if path else None, [], environ=variables, dotenv="no .env")
    if "GPU_HOST" in variables:
        assert config.network.gpu_host in ("0.0.0.0", "gpu-server")
        assert config.network.token_file == "/run/secrets/feed_token"
    if "DTRAIN_TRACKING__TRACKERS" in variables:
        assert config.tracking.trackers == ["tensorboard"]


def test_services_run_what_the_images_have() -> None:
    assert {name: entry_point(service)[0] for name, service in services().items()} == {
        "gpu-server": "dtrain",
        "cpu-loader": "dtrain",
        "ddp": "dtrain",
        "benchmark": "dtrain",
        "tensorboard": "tensorboard",
    }
    gpus = {name for name, service in services().items() if "reservations" in str(service.get("deploy"))}
    assert gpus == {name for name, service in services().items() if service["build"]["target"] == "gpu"}


def test_ports_are_open_to_this_machine_only_unless_asked() -> None:
    ports = [port for service in services().values() for port in service.get("ports", [])]

    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert len(ports) == 2


def test_variables_are_explained() -> None:
    page = (ROOT / "docs" / "docker.md").read_text()

    assert [m["name"] for m in VARIABLE.finditer(FILE.read_text()) if f"`{m['name']}`" not in page] == []


def test_without_gpus_the_same_services_use_the_other_image() -> None:
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!reset", lambda loader, node: "reset")
    text = (ROOT / "docker" / "compose.cpu.yaml").read_text()
    changed = yaml.load(text, Loader)["services"]

    assert changed.keys() == {name for name, service in services().items() if service["build"]["target"] == "gpu"}
    for service in changed.values():
        assert service == {
            "image": "distributed-training:cpu",
            "build": {"target": "cpu"},
            "deploy": "reset",
        }


def test_requirements_are_those_of_the_extras() -> None:
    requirements = script("requirements").requirements

    found = requirements(ROOT / "pyproject.toml", ["plots", "feed"])
    assert found[0].startswith("torch")
    assert any(line.startswith("matplotlib") for line in found)
    assert any(line.startswith("cryptography") for line in found)
    with pytest.raises(SystemExit, match="no such extra: plot; there are plots"):
        requirements(ROOT / "pyproject.toml", ["plot"])
    for extras in re.findall(r"^ARG EXTRAS=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE):
        requirements(ROOT / "pyproject.toml", extras.split(","))


def test_health_is_that_of_sockets() -> None:
    healthy = script("health").healthy

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert not healthy("listening", port)
        server.listen()
        assert healthy("listening", port)
        assert not healthy("connected", port)
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            assert healthy("connected", port)
