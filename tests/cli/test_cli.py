"""The commands as a person types them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from distributed_training.runtime.run_directory import RunDirectory

SHORT = ("training.epochs=2", "run.name=short")


def test_train_tells_what_came_out_where_it_is_and_what_to_try(dtrain: Callable) -> None:
    outcome = dtrain("train", *SHORT)
    assert outcome.code == 0
    assert "epoch 2/2" in outcome.err
    assert "samples/s" in outcome.err
    assert "Training completed (2 epochs, 46 steps" in outcome.out
    assert "held-out accuracy" in outcome.out
    assert "dtrain validate runs/short" in outcome.out
    run = RunDirectory(Path("runs/short"))
    assert run.load_config().training.epochs == 2
    assert (run.report / "index.html").is_file()
    assert (run.report / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run.report / "accuracy.png").is_file()
    assert len(run.ledger_file.read_text().splitlines()) == 46
    assert [e["event"] for e in run.events()][-1] == "finish"


def test_the_default_job_reaches_the_accuracy_it_promises(dtrain: Callable) -> None:
    assert dtrain("train", "run.name=full", "run.progress=off").code == 0
    last = list(RunDirectory(Path("runs/full")).events())[-1]
    assert last["status"] == "completed"
    assert last["val_accuracy"] >= 0.97


def test_resume_goes_on_with_the_settings_of_the_run(dtrain: Callable) -> None:
    dtrain("train", *SHORT, "model.args.hidden=[16]")
    outcome = dtrain("train", "--resume", "auto", "training.epochs=3", "run.name=short")
    assert outcome.code == 0
    assert "epoch 3/3" in outcome.err
    assert "epoch 2/3" not in outcome.err
    config = RunDirectory(Path("runs/short")).load_config()
    assert config.model.args == {"hidden": [16]}
    assert config.training.epochs == 3
    assert config.checkpoint.resume == "never"


def test_resume_auto_without_any_word_takes_the_newest_run(dtrain: Callable) -> None:
    dtrain("train", *SHORT, "model.args.hidden=[16]")
    outcome = dtrain("train", "--resume", "auto")
    assert outcome.code == 0
    assert "runs/short" in outcome.out
    assert "Training completed (2 epochs, 46 steps" in outcome.out


def test_resume_auto_starts_when_there_is_nothing_to_resume(dtrain: Callable) -> None:
    outcome = dtrain("train", "--resume", "auto", *SHORT)
    assert outcome.code == 0
    assert "46 steps" in outcome.out


def test_resume_from_a_checkpoint_that_is_not_the_newest_starts_a_new_run(dtrain: Callable) -> None:
    dtrain("train", *SHORT)
    first = min(Path("runs/short/checkpoints").glob("step-*"))
    outcome = dtrain("train", "--resume", str(first), "run.name=fork")
    assert outcome.code == 0
    assert RunDirectory(Path("runs/fork")).config_file.is_file()
    starts = [e["resumed_from"] for e in RunDirectory(Path("runs/fork")).events() if e["event"] == "start"]
    assert starts == [23]


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(dtrain: Callable) -> None:
    dtrain("train", *SHORT)
    newest = max(Path("runs/short/checkpoints").glob("step-*"))
    state = newest / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    outcome = dtrain("train", "--resume", "runs/short")
    assert outcome.code == 0
    assert "checkpoint passed over" in outcome.err
    assert "damaged" in outcome.err
    assert "Training completed (2 epochs, 46 steps" in outcome.out


def test_validate_gives_the_figures_of_the_best_checkpoint(dtrain: Callable) -> None:
    dtrain("train", *SHORT)
    metrics = [e for e in RunDirectory(Path("runs/short")).events() if e.get("val_loss") and e["event"] == "metrics"]
    best = min(e["val_loss"] for e in metrics)
    found = json.loads(dtrain("validate", "runs/short", "--json").out)
    assert found["loss"] == pytest.approx(best, rel=1e-5)
    assert found["samples"] == 359
    text = dtrain("validate", "runs/short", "--checkpoint", "last").out
    assert "step-0000000046" in text
    assert "accuracy" in text


def test_predict_writes_one_row_a_sample_in_order(dtrain: Callable) -> None:
    dtrain("train", "training.epochs=5", "run.name=short", "run.progress=off")
    outcome = dtrain("predict", "runs/short", "--output", "out.csv")
    assert outcome.code == 0
    rows = list(csv.DictReader(Path("out.csv").read_text().splitlines()))
    assert [int(row["sample"]) for row in rows] == list(range(359))
    dtrain("predict", "runs/short", "--output", "out.npy")
    logits = np.load("out.npy")
    assert [int(row["prediction"]) for row in rows] == logits.argmax(1).tolist()
    assert all(0 < float(row["confidence"]) <= 1 for row in rows)
    printed = dtrain("predict", "runs/short").out
    assert printed.splitlines()[0] == "sample,prediction,confidence"


def test_predict_with_a_csv_dataset_uses_names_of_classes_and_without_classes_gives_outputs(dtrain: Callable) -> None:
    lines = ["a,b,kind", *(f"{i},{-i},{'cat' if i % 2 else 'dog'}" for i in range(40))]
    Path("pets.csv").write_text("\n".join(lines))
    data = ("data.dataset=csv", "data.root=pets.csv", "training.batch_size=8", "training.epochs=1", "run.progress=off")
    assert dtrain("train", *data, "run.name=pets").code == 0
    rows = list(csv.DictReader(dtrain("predict", "runs/pets").out.splitlines()))
    assert {row["prediction"] for row in rows} <= {"cat", "dog"}
    Path("price.csv").write_text("\n".join(["a,b,price", *(f"{i},{-i},{i * 1.5}" for i in range(40))]))
    regression = (*data, "data.root=price.csv", "model.num_classes=1", "run.name=price", "training.loss=mse")
    assert dtrain("train", *regression).code == 0
    rows = list(csv.DictReader(dtrain("predict", "runs/price").out.splitlines()))
    assert set(rows[0]) == {"sample", "output_0"}


def test_a_damaged_best_checkpoint_is_passed_over(dtrain: Callable) -> None:
    dtrain("train", *SHORT, "checkpoint.keep=2")
    best = max(Path("runs/short/checkpoints").glob("step-*"))
    (best / "state.safetensors").write_bytes(b"damaged")
    outcome = dtrain("validate", "runs/short")
    assert outcome.code == 0
    assert "the best checkpoint is passed over" in outcome.err
    assert "step-0000000023" in outcome.out
    for state in Path("runs/short/checkpoints").glob("*/state.safetensors"):
        state.write_bytes(b"damaged")
    assert "no usable checkpoint" in dtrain("validate", "runs/short").err


def test_validate_says_when_there_is_no_held_out_data(dtrain: Callable) -> None:
    outcome = dtrain("train", *SHORT, "data.validation_fraction=0", "training.epochs=1")
    assert "held-out" not in outcome.out
    outcome = dtrain("validate", "runs/short")
    assert "no held-out data" in outcome.err
    assert "1797 samples" in outcome.out


def test_a_run_made_in_python_is_continued_in_python(dtrain: Callable) -> None:
    import torch

    from distributed_training import Config, Trainer

    config = Config().replace(**{"run.progress": "off", "run.name": "mine"})
    Trainer(torch.nn.Linear(3, 2), config=config).train((torch.randn(64, 3), torch.randint(0, 2, (64,))), epochs=1)
    assert RunDirectory(Path("runs/mine")).load_config().model.target == "torch.nn.modules.linear:Linear"
    outcome = dtrain("validate", "runs/mine")
    assert outcome.code == 4
    assert "Trainer(..., run_dir='runs/mine').train(..., resume='auto')" in outcome.err
    dtrain("train", *SHORT)
    again = dtrain("train", "--resume", "auto")  # not the run of another program, even if it is newer
    assert "runs/short" in again.out


def test_a_metric_to_monitor_that_does_not_exist_is_said_once(dtrain: Callable) -> None:
    outcome = dtrain("train", *SHORT, "checkpoint.monitor=val_acc")
    assert outcome.code == 0
    assert outcome.err.count("checkpoint.monitor=val_acc is not among val_loss, val_accuracy") == 1


def test_report_prints_the_page(dtrain: Callable) -> None:
    dtrain("train", *SHORT)
    assert dtrain("report", "runs/short").out.strip() == "runs/short/report/index.html"


def test_config_explain_shows_value_source_and_what_it_overrode(dtrain: Callable, monkeypatch) -> None:
    Path("config.yaml").write_text("training:\n  lr: 0.5\n")
    monkeypatch.setenv("BATCH_SIZE", "32")
    lines = dtrain("config", "explain", "training.lr=0.25").out.splitlines()
    row = next(line for line in lines if line.startswith("training.lr "))
    assert "0.25" in row
    assert "command line" in row
    assert "overrode 0.5 (config.yaml), 0.002 (default)" in row
    assert any("environment: BATCH_SIZE" in line for line in lines)
    changed = dtrain("config", "explain", "--changed", "--json").out
    assert {entry["key"] for entry in json.loads(changed)} == {"training.lr", "training.batch_size"}


def test_config_show_and_init_write_files_that_load(dtrain: Callable) -> None:
    shown = dtrain("config", "show", "training.epochs=7").out
    assert "epochs: 7" in shown
    assert dtrain("config", "init").code == 0
    assert dtrain("config", "explain", "config.yaml").code == 0
    again = dtrain("config", "init")
    assert again.code == 2
    assert "exists already" in again.err


def test_version_names_what_a_bug_report_needs(dtrain: Callable) -> None:
    out = dtrain("version").out
    assert "torch" in out
    assert "distributed_training" in out
    assert "python" in out


def test_variables_of_dotenv_that_are_not_settings_reach_libraries(dtrain: Callable, monkeypatch) -> None:
    monkeypatch.setenv("SOME_LIBRARY_KEY", "mine")
    monkeypatch.delenv("SOME_LIBRARY_KEY")  # so that monkeypatch removes what the command sets
    Path(".env").write_text("SOME_LIBRARY_KEY=abc\nBATCH_SIZE=16\n")
    out = dtrain("config", "explain", "--changed").out
    assert ".env: BATCH_SIZE" in out
    import os

    assert os.environ.pop("SOME_LIBRARY_KEY") == "abc"


def test_help_teaches_with_examples_and_does_not_import_torch(in_tmp: Path) -> None:
    for words in (["--help"], ["train", "--help"], ["config", "explain", "--help"]):
        command = [sys.executable, "-X", "importtime", "-m", "distributed_training", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0
        assert "dtrain train" in done.stdout or "dtrain config explain" in done.stdout
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert not {"torch", "numpy", "omegaconf", "matplotlib"} & imported


def test_importing_the_package_imports_neither_torch_nor_numpy(in_tmp: Path) -> None:
    check = "import sys, distributed_training; assert not {'torch', 'numpy', 'omegaconf', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
