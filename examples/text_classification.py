"""A text classifier from data to a folder that transformers loads, and on to the Hub.

python scripts/make_tiny_text_model.py data/tiny                 a tiny model, made offline
python examples/text_classification.py                           trains it on examples/text/topics
python examples/text_classification.py --checkpoint distilbert/distilbert-base-uncased --lr 5e-5
accelerate launch examples/text_classification.py --accelerated  on all GPUs
"""

from __future__ import annotations

import argparse
from pathlib import Path

from distributed_training import AcceleratedTrainer, BasicTrainer, DistributedTrainingError
from distributed_training.huggingface import load_data, load_model, load_tokenizer, process

TOPICS = Path(__file__).parent / "text" / "topics"


def main() -> None:
    """Load, train, evaluate, save, push."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="data/tiny/sequence-classification", help="a folder, or a Hub name")
    parser.add_argument("--data", default=str(TOPICS), help="a folder or file")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--lora", action="store_true", help="train adapters in place of the weights")
    parser.add_argument("--accelerated", action="store_true", help="AcceleratedTrainer in place of BasicTrainer")
    parser.add_argument("--save", default="my-model", help="folder for the trained model")
    parser.add_argument("--push", metavar="USER/NAME", help="repository on the Hub")
    options = parser.parse_args()

    tokenizer = load_tokenizer(options.checkpoint)
    data = process(load_data(options.data), tokenizer, task="sequence_classification", truncation=True)
    model = load_model(
        options.checkpoint,
        "sequence_classification",
        labels=data["train"].classes,
        lora={"rank": 8} if options.lora else None,
    )
    kind = AcceleratedTrainer if options.accelerated else BasicTrainer
    with kind(
        model, data["train"], data["validation"], tokenizer=tokenizer, epochs=options.epochs, lr=options.lr
    ) as trainer:
        result = trainer.train()
        metrics = trainer.evaluate()
        folder = trainer.save_model(options.save, merge=options.lora)
        address = trainer.push_to_hub(options.push, merge=options.lora) if options.push else None
    print(f"{result.status} after {result.steps} steps: " + ", ".join(f"{k} {v:.4f}" for k, v in metrics.items()))
    print(f"saved in {folder}" + (f", pushed to {address}" if address else ""))


if __name__ == "__main__":
    try:
        main()
    except DistributedTrainingError as error:
        raise SystemExit(f"error: {error}") from None
