"""The source that travels: what git ignores and what is secret stays here; what comes back cannot leave its folder."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from distributed_training import DistributedTrainingError
from distributed_training.launch.sagemaker.fetching import unpack
from distributed_training.launch.sagemaker.leaks import refuse_secrets_in_words
from distributed_training.launch.sagemaker.packing import Source, find_source, write_archive
from distributed_training.launch.sagemaker.starting import requirements


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def source_of(root: Path, *named: Path, exclude: tuple[str, ...] = (), max_mb: int = 10) -> Source:
    return find_source(root, requirements([]), exclude, root / "runs", max_mb, named)


@pytest.mark.parametrize("repository", [True, False])
def test_what_git_ignores_and_secrets_stay_here(tmp_path: Path, repository: bool) -> None:
    write(tmp_path, model_dot_py="x = 1", sub__deep_dot_py="y = 2", notes_dot_log="long", config_dot_yaml="a: 1")
    write(tmp_path, _dot_gitignore="*.log\n/config.yaml\n", _dot_env="WANDB_API_KEY=abc", runs__a__b=".")
    write(tmp_path, server_dot_pem="key", book_dot_ipynb="{}")
    (tmp_path / "outside").symlink_to("/etc/hostname")
    if repository:
        subprocess.run(["git", "init", "--quiet", tmp_path], check=True, timeout=30)

    source = source_of(tmp_path, Path("config.yaml"), exclude=("*.ipynb",))

    assert [str(file) for file in source.files] == [".gitignore", "config.yaml", "model.py", "sub/deep.py"]
    assert {str(file) for file in source.left_here} == {".env", "outside", "server.pem"}
    assert not (tmp_path / ".git").exists() or repository


def test_the_archive_holds_the_package_and_is_the_same_every_time(tmp_path: Path) -> None:
    write(tmp_path, train_dot_py="print(1)")
    source = source_of(tmp_path)

    for name in ("one.tar.gz", "two.tar.gz"):
        write_archive(source, tmp_path / name)

    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "one.tar.gz") as archive:
        names = archive.getnames()
        needs = archive.extractfile(".dtrain/requirements.txt")
        assert needs is not None
        wanted = needs.read().decode()
    package = ".dtrain/distributed_training"
    assert {"train.py", f"{package}/launch/sagemaker/entry.py", f"{package}/py.typed", ".dtrain/start.sh"} <= {*names}
    assert not [name for name in names if "__pycache__" in name or name.startswith("/")]
    assert "omegaconf" in wanted
    assert "torch>" not in wanted.replace("torchmetrics", "")


def test_too_large_a_source_names_its_largest_files(tmp_path: Path) -> None:
    write(tmp_path, weights_dot_bin="0" * 2_000_000, small_dot_py="1")

    with pytest.raises(DistributedTrainingError, match=r"weights\.bin \(2\.0 MB\).*--data s3://"):
        source_of(tmp_path, max_mb=1)


def test_secrets_in_files_and_words_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, good_dot_py="token = os.environ['HF_TOKEN']\nkey = 'AKIAIOSFODNN7EXAMPLE'\n")
    source_of(tmp_path)
    token = "hf_" + "aB3" * 12
    write(tmp_path, bad_dot_py=f"import os\nlogin('{token}')\n")
    with pytest.raises(DistributedTrainingError, match=r"bad\.py, line 2: .* Hugging Face token") as error:
        source_of(tmp_path)
    assert token not in str(error.value)
    source_of(tmp_path, exclude=("bad.py",))

    monkeypatch.setenv("WANDB_API_KEY", "f00dcafe" * 5)
    with pytest.raises(DistributedTrainingError, match=r"tracking\.entity=\.\.\. holds the value of WANDB_API_KEY"):
        refuse_secrets_in_words(["train", "tracking.entity=" + "f00dcafe" * 5])


def test_a_named_file_must_be_inside(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    write(tmp_path, config_dot_yaml="a: 1")

    with pytest.raises(DistributedTrainingError, match="lies outside"):
        source_of(tmp_path / "project", tmp_path / "config.yaml")


@pytest.mark.parametrize("name", ["../evil", "link"])
def test_an_archive_cannot_write_elsewhere(tmp_path: Path, name: str) -> None:
    archive = tmp_path / "model.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        entry = tarfile.TarInfo(name)
        if name == "link":
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(entry, io.BytesIO(b""))

    with pytest.raises(DistributedTrainingError, match="not unpacked"):
        unpack(archive, tmp_path / "run")

    archive.write_bytes(b"\x1f\x8bnothing")
    with pytest.raises(DistributedTrainingError, match="cannot be unpacked"):
        unpack(archive, tmp_path / "again")
