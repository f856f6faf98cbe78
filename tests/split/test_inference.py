"""Inference over real connections: right predictions in the dataset's order, in memory and in files."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as parquet
import pytest
import torch
from tests.feed.proxy import CuttingProxy
from tests.split.services import CLASSES, QUICK, WIDTH, Rows, arrays, network, probabilities, serving
from tests.training.examples import trainer
from torch import nn

from distributed_training.data import ArrayDataset, Dataset
from distributed_training.feed import LoaderSettings
from distributed_training.runtime.errors import ConfigError, DataError, FeedError
from distributed_training.split.inference import run_inference


def test_every_mode_says_the_same_and_sends_back_as_little_as_it_can() -> None:
    data = arrays(1003)
    expected = probabilities(data)
    received = {}
    same: dict[str, Any] = {"batch_size": 256, "confidence_threshold": 0.3, "settings": QUICK}
    with serving("inference") as service:
        for name, wanted in {
            "predictions": {"top_k": 1},
            "top_k": {"top_k": 3},
            "probabilities": {"top_k": 1, "return_full_probabilities": True},
        }.items():
            result = run_inference(data, service.link, **same, **wanted)
            assert result["total_samples"] == 1003
            assert result["transfer"]["mode"] == name
            received[name] = result["transfer"]["received_per_sample"]
            np.testing.assert_array_equal(result["predictions"], expected.argmax(1))
            np.testing.assert_allclose(result["confidences"], expected.max(1), rtol=1e-5)
            np.testing.assert_array_equal(result["passed"], np.flatnonzero(result["confidences"] >= np.float32(0.3)))
            assert result["passed_count"] == len(result["passed"]) < 1003
            if name == "top_k":
                order = np.argsort(-expected, axis=1)[:, :3]
                np.testing.assert_array_equal(result["top_classes"], order)
                np.testing.assert_allclose(
                    result["top_probabilities"], np.take_along_axis(expected, order, 1), rtol=1e-5
                )
            if name == "probabilities":
                np.testing.assert_allclose(result["probabilities"], expected, rtol=1e-5)
    assert 8 <= received["predictions"] < 10
    assert 24 <= received["top_k"] < 26
    assert 8 + 4 * CLASSES <= received["probabilities"] < 10 + 4 * CLASSES


@pytest.mark.parametrize("workers", [1, 2])
def test_the_order_is_that_of_the_dataset_whatever_the_number_of_workers(workers: int) -> None:
    data = arrays(301)
    with serving("inference") as service:
        result = run_inference(Rows(data), service.link, batch_size=7, num_workers=workers, settings=QUICK)
    np.testing.assert_array_equal(result["predictions"], probabilities(data).argmax(1))


def test_files_hold_what_memory_would(tmp_path: Path) -> None:
    data = ArrayDataset(arrays(), num_classes=CLASSES)
    data.classes = [f"class {number}" for number in range(CLASSES)]
    wanted: dict[str, Any] = {"batch_size": 32, "return_full_probabilities": True, "settings": QUICK}
    with serving("inference") as service:
        here = run_inference(data, service.link, **wanted)
        for name in ("out.npy", "out.parquet", "out.csv"):
            there = run_inference(data, service.link, output=tmp_path / name, **wanted)
            assert there["output"] == str(tmp_path / name)
            assert there["predictions"] is None
            assert there["passed_count"] == here["passed_count"]
            assert there["estimated_memory_mb"] == here["estimated_memory_mb"]
    stored = np.load(tmp_path / "out.npy", mmap_mode="r", allow_pickle=False)
    table = parquet.read_table(tmp_path / "out.parquet")
    columns = {
        "prediction": "predictions", "confidence": "confidences", "top_classes": "top_classes",
        "top_probabilities": "top_probabilities", "probabilities": "probabilities",
    }  # fmt: skip
    for column, name in columns.items():
        np.testing.assert_array_equal(stored[column], here[name])
        np.testing.assert_array_equal(np.array(table[column].to_pylist(), here[name].dtype), here[name])
    assert table["sample"].to_pylist() == list(range(203))
    assert np.flatnonzero(table["passed"].to_numpy()).tolist() == here["passed"].tolist()
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["prediction"] for row in rows] == [f"class {best}" for best in here["predictions"]]
    assert {path.name for path in tmp_path.iterdir()} == {"out.npy", "out.parquet", "out.csv"}


@pytest.mark.parametrize("name", ["out.npy", "out.parquet", "out.csv"])
def test_a_failed_inference_leaves_no_file_and_a_former_one_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("from before")
    dataset = Rows(arrays(60), bad=(50,))
    with serving("inference") as service:
        with pytest.raises(DataError, match="sample 50 cannot be loaded"):
            run_inference(dataset, service.link, batch_size=4, output=tmp_path / name, settings=QUICK)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert (tmp_path / name).read_text() == "from before"
        with pytest.raises(ConfigError, match=r"\.npy, \.parquet, \.csv"):
            run_inference(dataset, service.link, output=tmp_path / "out.txt", settings=QUICK)
        with pytest.raises(ConfigError, match="no folder"):
            run_inference(dataset, service.link, output=tmp_path / "no" / "out.npy", settings=QUICK)


def test_samples_that_are_left_out_keep_their_row(tmp_path: Path) -> None:
    data, bad = arrays(40), (0, 9, 10, 11, 39)
    wanted: dict[str, Any] = {"batch_size": 3, "on_bad_sample": "skip", "settings": QUICK}
    with serving("inference") as service:
        here = run_inference(Rows(data, bad), service.link, **wanted)
        run_inference(Rows(data, bad), service.link, output=tmp_path / "out.npy", **wanted)
    stored = np.load(tmp_path / "out.npy")
    expected = probabilities(data).argmax(1)
    expected[list(bad)] = -1
    np.testing.assert_array_equal(here["predictions"], expected)
    np.testing.assert_array_equal(stored["prediction"], expected)
    assert np.isnan(here["confidences"][list(bad)]).all()
    assert (here["total_samples"], sorted(here["skipped"])) == (35, list(bad))
    assert not set(here["passed"]) & set(bad)


def test_other_models_give_their_outputs(tmp_path: Path) -> None:
    data = arrays(30)[0]
    net = network(outputs=2)
    with torch.no_grad():
        expected = net.eval()(data).numpy()
    with serving("inference", trainer(net, training__loss="mse")) as service:
        result = run_inference(data, service.link, batch_size=8, settings=QUICK)
        run_inference(data, service.link, batch_size=8, output=tmp_path / "out.csv", settings=QUICK)
    np.testing.assert_allclose(result["predictions"], expected, rtol=1e-5)
    assert result["confidences"] is None
    assert result["passed"] is None
    assert (tmp_path / "out.csv").read_text().splitlines()[0] == "sample,output_0,output_1"
    with serving("inference", trainer(nn.LSTM(WIDTH, 3))) as service, pytest.raises(FeedError, match="not one tensor"):
        run_inference(data, service.link, settings=QUICK)


@pytest.mark.parametrize("seed", range(2))
def test_a_cut_connection_leaves_no_gap_and_nothing_twice(seed: int, tmp_path: Path) -> None:
    data = arrays(2000, seed=seed)
    with serving("inference") as service, CuttingProxy(service.server.port, seed, 4, 80_000) as proxy:
        link = f"127.0.0.1:{proxy.port}"
        result = run_inference(data, link, batch_size=8, output=tmp_path / "out.npy", settings=QUICK)
        assert proxy.cut == 4
    assert result["transfer"]["connections"] > 1
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy")["prediction"], probabilities(data).argmax(1))


class _Computed(Dataset):
    """Samples that take no memory."""

    def __len__(self) -> int:
        return 800_000

    def fetch(self, ids: np.ndarray) -> Any:
        return torch.from_numpy((ids[:, None] % np.arange(1, WIDTH + 1)).astype(np.float32))

    def fingerprint(self) -> str:
        return "computed"


def test_many_results_go_to_a_file_without_passing_through_memory(tmp_path: Path) -> None:
    wanted = {"batch_size": 4096, "return_full_probabilities": True, "top_k": 1}
    with serving("inference", trainer(nn.Linear(WIDTH, 120)), memory=32 << 20) as service:
        settings = LoaderSettings(memory=16 << 20)
        process, most = psutil.Process(), 0
        before = process.memory_info().rss

        def look(done: int, total: int) -> None:
            nonlocal most
            most = max(most, process.memory_info().rss - before)

        path = tmp_path / "out.npy"
        result = run_inference(_Computed(), service.link, output=path, settings=settings, on_progress=look, **wanted)
    assert result["total_samples"] == 800_000
    size = os.path.getsize(path)
    assert size > 380e6
    assert result["estimated_memory_mb"] == pytest.approx((4 * 120 + 9) * 800_000 / 2**20)
    # Both sides together, in one process: 50 MB by their settings, and what the allocator keeps for each thread.
    assert most < size / 2
    path.unlink()


def test_a_result_larger_than_the_usual_window_gets_through() -> None:
    data = torch.randn(2100, WIDTH)
    with serving("inference", trainer(nn.Linear(WIDTH, 2500))) as service:  # 21 MB in one result
        wanted = {"batch_size": 2100, "return_full_probabilities": True, "top_k": 1}
        result = run_inference(data, service.link, settings=QUICK, **wanted)
        assert result["probabilities"].shape == (2100, 2500)
        with pytest.raises(FeedError, match=r"one result .* takes .* smaller batch size"):
            run_inference(data, service.link, settings=LoaderSettings(memory=8 << 20), **wanted)


def test_nonsense_is_refused_before_anything_is_sent() -> None:
    for wrong in ({"top_k": 0}, {"confidence_threshold": 1.5}, {"batch_size": 0}, {"on_bad_sample": "ignore"}):
        with pytest.raises(ConfigError):
            run_inference(arrays(4), "127.0.0.1:1", settings=QUICK, **wrong)
