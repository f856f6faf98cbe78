"""BasicTrainer beside the Trainer of transformers, and ZeRO under Accelerate beside BasicTrainer, in one run.

    python benchmarks/huggingface.py [--rounds 5] [--epochs 3]

Both sides train the same tiny BERT from the same weights on the same tokenised sentences, in the same order (theirs is
given a sampler that follows our plan), with the same AdamW, schedule and clipping. Compared are the losses of all
steps, which must agree within 1e-4, and samples per second of a whole training without logging, saving and validation,
turn by turn. Then AcceleratedTrainer trains on two ranks with ZeRO-2 and ZeRO-3 (no dropout: ranks draw other numbers
than one process). Writes benchmarks/results/huggingface.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
TOLERANCE = 1e-4
BATCH, RATE, DECAY, CLIP, SEED = 16, 1e-3, 0.01, 1.0, 0
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def prepare(folder: Path) -> tuple[Any, Any]:
    """(the tiny model's folder, tokenised sentences with labels)."""
    sys.path.insert(0, str(ROOT))
    from scripts.make_tiny_text_model import make

    checkpoint = folder / "sequence-classification"
    if not checkpoint.exists():
        make(folder, ["sequence-classification"])
    import datasets
    import transformers

    datasets.disable_progress_bars()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    data = datasets.load_dataset(
        "csv", data_files=str(ROOT / "examples/text/topics/train.csv"), split="train", cache_dir=str(folder / "cache")
    )
    names = sorted(set(data["label"]))
    data = data.map(
        lambda rows: {**tokenizer(rows["text"], truncation=True), "labels": [names.index(n) for n in rows["label"]]},
        batched=True,
        remove_columns=data.column_names,
    )
    return checkpoint, (data, tokenizer, names)


def make_model(checkpoint: Path, names: list[str]) -> Any:
    """The same weights every time."""
    import torch

    from distributed_training.huggingface import load_model

    torch.manual_seed(SEED)
    return load_model(str(checkpoint), "sequence_classification", labels=names, overrides=NO_DROPOUT)


class Losses:
    """Remembers the loss of every step."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def values(self) -> list[float]:
        """As numbers."""
        return [float(loss) for loss in self.found]


def ours(kind: str, checkpoint: Path, parts: Any, epochs: int, record: bool, **settings: Any) -> tuple[Any, float]:
    """(losses or None, seconds) of a training by one of our trainers."""
    from distributed_training import Callback
    from distributed_training import huggingface as hf

    data, tokenizer, names = parts
    losses = Losses()

    class Recorder(Callback):
        def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
            losses.found.append(trainer.strategy.reduce(loss.float()))

    trainer = getattr(hf, kind)(
        make_model(checkpoint, names),
        data,
        tokenizer=tokenizer,
        callbacks=[Recorder()] if record else [],
        run_dir=False,
        epochs=epochs,
        batch_size=BATCH,
        lr=RATE,
        weight_decay=DECAY,
        gradient_clip=CLIP,
        seed=SEED,
        device="cpu",
        precision="fp32",
        log_every=1000,
        **settings,
    )
    begin = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begin
    trainer.close()
    return losses.values() if record else None, seconds


def theirs(checkpoint: Path, parts: Any, epochs: int, record: bool, folder: Path) -> tuple[Any, float]:
    """The same by transformers."""
    import torch
    import transformers
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    from distributed_training import Plan

    data, tokenizer, names = parts
    plan, losses = Plan(len(data), BATCH, SEED), Losses()

    class Planned(torch.utils.data.Sampler):
        """Our order of the samples."""

        def __init__(self) -> None:
            self._epoch = 0

        def __len__(self) -> int:
            return len(data)

        def __iter__(self) -> Iterator[int]:
            epoch, self._epoch = self._epoch, self._epoch + 1
            for step in range(plan.steps_per_epoch):
                yield from plan.ids(epoch, step).tolist()

    class Recording(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return Planned()

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            if record:
                losses.found.append(loss.detach())
            return loss

    transformers.logging.set_verbosity_error()
    arguments = TrainingArguments(
        output_dir=str(folder / "theirs"),
        num_train_epochs=epochs,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        lr_scheduler_type="linear",
        seed=SEED,
        save_strategy="no",
        logging_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Recording(
        make_model(checkpoint, names),
        arguments,
        train_dataset=data,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    begin = time.perf_counter()
    trainer.train()
    return losses.values() if record else None, time.perf_counter() - begin


def measure(rounds: int, epochs: int) -> dict[str, Any]:
    """All of it."""
    import torch

    from distributed_training.runtime.device import machine_facts

    with tempfile.TemporaryDirectory(prefix="dtrain-hf-") as temporary:
        folder = Path(temporary)
        checkpoint, parts = prepare(folder)
        samples = len(parts[0]) * epochs
        expected, _ = theirs(checkpoint, parts, epochs, True, folder)
        found, _ = ours("BasicTrainer", checkpoint, parts, epochs, True)
        speeds: dict[str, list[float]] = {"transformers": [], "ours": []}
        for number in range(rounds):
            turns = ["transformers", "ours"] if number % 2 == 0 else ["ours", "transformers"]
            for side in turns:
                if side == "ours":
                    _, seconds = ours("BasicTrainer", checkpoint, parts, epochs, False)
                else:
                    _, seconds = theirs(checkpoint, parts, epochs, False, folder)
                speeds[side].append(samples / seconds)
            print(
                f"round {number + 1}: " + ", ".join(f"{s} {v[-1]:.0f} samples/s" for s, v in speeds.items()), flush=True
            )
        zero = {f"ZeRO-{stage}": on_ranks(stage, folder, epochs) for stage in (2, 3)}
    machine = {key: value for key, value in machine_facts(torch.device("cpu")).items() if key != "host"}
    return {
        "machine": machine,
        "versions": versions(),
        "steps": len(expected),
        "difference": largest(found, expected),
        "first": [expected[0], found[0]],
        "last": [expected[-1], found[-1]],
        "speeds": speeds,
        "ratio": statistics.median(a / b for a, b in zip(speeds["ours"], speeds["transformers"])),
        "zero": {name: largest(losses, found) for name, losses in zero.items()},
    }


def on_ranks(stage: int, folder: Path, epochs: int) -> list[float]:
    """The losses of AcceleratedTrainer on two ranks with a ZeRO stage."""
    file = folder / f"zero-{stage}.json"
    words = ["--standalone", "--nproc_per_node=2", __file__, "--stage", str(stage), "--epochs", str(epochs)]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "--folder", str(folder)],
        check=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    losses: list[float] = json.loads(file.read_text())
    return losses


def largest(one: list[float], other: list[float]) -> float:
    """The largest difference of two curves."""
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other))


def versions() -> dict[str, str]:
    """Of the libraries compared."""
    import importlib.metadata

    return {name: importlib.metadata.version(name) for name in ("transformers", "accelerate", "deepspeed")}


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    names = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    speeds = {side: statistics.median(values) for side, values in report["speeds"].items()}
    rows = [
        f"| BasicTrainer to transformers' Trainer | {report['difference']:.1e} |",
        *(f"| AcceleratedTrainer, {name}, 2 ranks, to BasicTrainer | {d:.1e} |" for name, d in report["zero"].items()),
    ]
    what = (
        f"`python benchmarks/huggingface.py`: a tiny BERT on the shipped topics, {report['steps']} steps of {BATCH} "
        f"sentences, AdamW, linear schedule, fp32 on the CPU; torch {report['machine']['torch']}, {names}."
    )
    return "\n".join(
        [
            "# Hugging Face: beside the Trainer of transformers",
            "",
            what,
            "",
            "| loss curves | largest difference of any step |",
            "|---|---|",
            *rows,
            "",
            f"From {report['first'][0]:.4f} to {report['last'][0]:.4f}; {TOLERANCE:g} is allowed.",
            "",
            "| | samples/s, median | |",
            "|---|---|---|",
            f"| transformers' Trainer | {speeds['transformers']:,.0f} | 1.00 |",
            f"| BasicTrainer | {speeds['ours']:,.0f} | {report['ratio']:.2f} |",
            "",
        ]
    )


def main() -> None:
    """Compare and write the report; non-zero where the curves differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage is not None:
        checkpoint, parts = prepare(options.folder)
        losses, _ = ours("AcceleratedTrainer", checkpoint, parts, options.epochs, True, zero_stage=options.stage)
        if os.environ["RANK"] == "0":
            (options.folder / f"zero-{options.stage}.json").write_text(json.dumps(losses))
        return
    report = measure(options.rounds, options.epochs)
    print(markdown(report))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "huggingface.json").write_text(json.dumps(report, indent=2) + "\n")
    (RESULTS / "huggingface.md").write_text(markdown(report))
    worst = max(report["difference"], *report["zero"].values())
    sys.exit(f"the curves differ by {worst:.1e}" if worst > TOLERANCE else None)


if __name__ == "__main__":
    main()
