"""CIFAR from extracted files, from the archive and from a (local) web server, whole and damaged."""

from __future__ import annotations

import hashlib
import http.server
import io
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.dataset import DatasetContract

from distributed_training.config.schema import DataConfig
from distributed_training.data.base import Dataset, Splits
from distributed_training.data.sources import download, load_dataset
from distributed_training.runtime.errors import ConfigError, DataError

TRAIN10 = [f"data_batch_{i}.bin" for i in range(1, 6)]


def records(count: int, labels: list[list[int]], start: int = 0) -> bytes:
    """`count` records whose pixels all have the value of their number, cycling through the labels."""
    rows = [bytes(labels[i % len(labels)]) + bytes([(start + i) % 256]) * 3072 for i in range(count)]
    return b"".join(rows)


def files10() -> dict[str, bytes]:
    files = {name: records(4, [[i], [9]], 10 * i) for i, name in enumerate(TRAIN10)}
    return {**files, "test_batch.bin": records(6, [[7]], 100)}


def files100() -> dict[str, bytes]:
    return {"train.bin": records(8, [[3, 40], [19, 99]]), "test.bin": records(4, [[0, 1]])}


def archive(files: dict[str, bytes], folder: str = "cifar-10-batches-bin") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def load(root: Path, dataset: str = "cifar10", **args: object) -> Splits:
    return load_dataset(DataConfig(dataset=dataset, root=str(root), args=args))


class TestCifar10(DatasetContract):
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(archive(files10()))
        return tmp_path

    @pytest.fixture
    def dataset(self, root: Path) -> Dataset:
        return load(root).train

    def test_train_batches_and_test_batch(self, root: Path) -> None:
        splits = load(root)
        images, labels = splits.train.fetch(np.arange(20))
        assert images.dtype == torch.uint8
        assert images.shape == (20, 3, 32, 32)
        assert labels.tolist()[:8] == [0, 9, 0, 9, 1, 9, 1, 9]
        assert images[5].unique().tolist() == [11]
        assert splits.validation is not None
        assert splits.validation.fetch(np.arange(6))[1].tolist() == [7] * 6
        assert splits.train.num_classes == splits.validation.num_classes == 10

    def test_nothing_is_unpacked(self, root: Path) -> None:
        load(root)
        assert [p.name for p in root.iterdir()] == ["cifar-10-binary.tar.gz"]

    def test_root_may_be_the_archive(self, root: Path) -> None:
        path = root / "cifar-10-binary.tar.gz"
        assert load(path).train.fingerprint() == load(root).train.fingerprint()

    @pytest.mark.parametrize("folder", ["", "cifar-10-batches-bin"])
    def test_extracted_files(self, root: Path, tmp_path: Path, folder: str) -> None:
        place = tmp_path / "extracted" / folder
        place.mkdir(parents=True)
        for name, data in files10().items():
            (place / name).write_bytes(data)
        assert load(tmp_path / "extracted").train.fingerprint() == load(root).train.fingerprint()

    def test_fingerprint_tells_changes(self, root: Path, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        changed = {**files10(), "data_batch_1.bin": records(4, [[0], [9]], 77)}
        (tmp_path / "other" / "cifar-10-binary.tar.gz").write_bytes(archive(changed))
        assert load(tmp_path / "other").train.fingerprint() != load(root).train.fingerprint()


def test_image_planes_are_rows_of_colours(tmp_path: Path) -> None:
    image = np.arange(3072, dtype=np.int64) % 251
    files = {name: bytes([1]) + image.astype(np.uint8).tobytes() for name in [*TRAIN10, "test_batch.bin"]}
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(archive(files))
    images, _ = load(tmp_path).train.fetch(np.array([2]))
    assert images[0, 1, 2, 3] == (1024 + 2 * 32 + 3) % 251


class TestCifar100(DatasetContract):
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        (tmp_path / "cifar-100-binary.tar.gz").write_bytes(archive(files100(), "cifar-100-binary"))
        return tmp_path

    @pytest.fixture
    def dataset(self, root: Path) -> Dataset:
        return load(root, "cifar100").train

    @pytest.mark.parametrize(("coarse", "classes", "labels"), [(False, 100, [40, 99]), (True, 20, [3, 19])])
    def test_fine_and_coarse_labels(self, root: Path, coarse: bool, classes: int, labels: list[int]) -> None:
        dataset = load(root, "cifar100", coarse=coarse).train
        assert dataset.num_classes == classes
        assert dataset.fetch(np.arange(2))[1].tolist() == labels

    def test_cifar10_has_no_coarse_labels(self, root: Path) -> None:
        with pytest.raises(ConfigError, match=r"data\.args\.coarse"):
            load(root, coarse=True)


class TestDamage:
    @pytest.mark.parametrize("keep", [0, 5, 200, -8])
    def test_truncated_archive(self, tmp_path: Path, keep: int) -> None:
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(archive(files10())[:keep])
        with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz: (damaged|not the right)"):
            load(tmp_path)

    def test_archive_of_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(archive(files100()))
        with pytest.raises(DataError, match=r"not the right archive, data_batch_1\.bin"):
            load(tmp_path)

    def test_links_are_not_followed(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_bytes(records(4, [[1]]))
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w:gz") as tar:
            for name in [*TRAIN10, "test_batch.bin"]:
                member = tarfile.TarInfo(f"../{name}")
                member.type, member.linkname = tarfile.SYMTYPE, str(secret)
                tar.addfile(member)
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(stream.getvalue())
        with pytest.raises(DataError, match="missing"):
            load(tmp_path)

    @pytest.mark.parametrize("size", [0, 100, 3073 * 2 - 1])
    def test_truncated_file(self, tmp_path: Path, size: int) -> None:
        for name, data in files10().items():
            (tmp_path / name).write_bytes(data[:size] if name == "data_batch_3.bin" else data)
        with pytest.raises(DataError, match=rf"data_batch_3\.bin.*{size} bytes.*truncated"):
            load(tmp_path)

    def test_missing_file(self, tmp_path: Path) -> None:
        for name, data in files10().items():
            (tmp_path / name).write_bytes(data)
        (tmp_path / "data_batch_4.bin").unlink()
        with pytest.raises(DataError, match=r"data_batch_4\.bin missing"):
            load(tmp_path)

    def test_label_out_of_range(self, tmp_path: Path) -> None:
        files = {**files10(), "test_batch.bin": records(3, [[1], [10]])}
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(archive(files))
        with pytest.raises(DataError, match=r"test_batch\.bin .*record 1: label 10 is not in 0\.\.9"):
            load(tmp_path)


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, bytes]]]:
    """A web server on loopback; its address and what it serves."""
    served: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = served.get(self.path)
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body) + (10 if self.path.startswith("/cut") else 0)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as web:
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{web.server_address[1]}", served
        web.shutdown()
        thread.join()


class TestDownload:
    def test_downloads_once(self, server: tuple[str, dict[str, bytes]], tmp_path: Path) -> None:
        url, served = server
        served["/a.tar.gz"] = archive(files10())
        md5 = hashlib.md5(served["/a.tar.gz"]).hexdigest()
        root = tmp_path / "new" / "folder"
        assert len(load(root, url=f"{url}/a.tar.gz", md5=md5.upper()).train) == 20
        assert [p.name for p in root.iterdir()] == ["cifar-10-binary.tar.gz"]
        served.clear()
        assert len(load(root).train) == 20

    def test_wrong_checksum(self, server: tuple[str, dict[str, bytes]], tmp_path: Path) -> None:
        url, served = server
        served["/a.tar.gz"] = archive(files10())
        with pytest.raises(DataError, match=r"checksum .*not c32a1d4a.*put it at .*cifar-10-binary\.tar\.gz"):
            load(tmp_path, url=f"{url}/a.tar.gz")
        assert list(tmp_path.iterdir()) == []

    def test_connection_cut(self, server: tuple[str, dict[str, bytes]], tmp_path: Path) -> None:
        url, served = server
        served["/cut"] = archive(files10())[:-10]
        with pytest.raises(DataError, match="put it at"):
            load(tmp_path, url=f"{url}/cut", md5=hashlib.md5(archive(files10())).hexdigest())
        assert list(tmp_path.iterdir()) == []

    def test_not_found(self, server: tuple[str, dict[str, bytes]], tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"404.*put it at .*cifar-10-binary\.tar\.gz"):
            load(tmp_path, url=f"{server[0]}/nothing")

    def test_nobody_answers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import socket

        monkeypatch.setattr(download, "TIMEOUT", 0.2)
        with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(DataError, match="timed out"):
            load(tmp_path, url=f"http://127.0.0.1:{silent.getsockname()[1]}/a")

    @pytest.mark.parametrize("url", ["file:///etc/passwd", "nonsense"])
    def test_other_addresses(self, tmp_path: Path, url: str) -> None:
        with pytest.raises(ConfigError, match=r"data\.args\.url"):
            load(tmp_path, url=url)

    def test_root_that_cannot_be_made(self, server: tuple[str, dict[str, bytes]], tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(DataError, match=r"download to .* failed"):
            load(tmp_path / "file" / "below", url=f"{server[0]}/a")
