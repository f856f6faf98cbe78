"""Make tiny Hugging Face models and their tokenizers from nothing, offline: what examples, tests and CI train on.

    python scripts/make_tiny_text_model.py data/tiny

writes four folders that `from_pretrained` takes, of 20,000 to 90,000 weights each, drawn from a fixed seed:

    sequence-classification/   BERT with a WordPiece tokenizer of examples/text; knows the three topics by name
    token-classification/      the same for names of persons, places and organisations
    causal-lm/                 Llama with a byte-level BPE tokenizer of examples/text
    image-classification/      ViT for images of 16 x 16 pixels

The same versions of the libraries give the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TEXT = Path(__file__).parents[1] / "examples" / "text"
SEED = 0
VOCABULARY = 2000
LONGEST = 128
TOPICS = ["cooking", "space", "sport"]
TAGS = ["B-LOC", "B-ORG", "B-PER", "I-LOC", "I-ORG", "I-PER", "O"]
WIDTH, LAYERS, HEADS = 32, 2, 4
SPREAD = 0.1  # of fresh weights: what suits wide models would let narrow ones start slowly


def main() -> None:
    """Read the command line and make what it asks for."""
    parser = argparse.ArgumentParser(description="Tiny Hugging Face models and tokenizers, made offline.")
    parser.add_argument("folder", type=Path, help="where the folders of the models go")
    parser.add_argument("--task", choices=sorted(TASKS), action="append", help="only this one; may be repeated")
    arguments = parser.parse_args()
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    make(arguments.folder, arguments.task)


def make(folder: str | Path, tasks: list[str] | None = None) -> dict[str, Path]:
    """Write the models of these tasks (all, where none is named) below a folder; where each one is."""
    made = {}
    for task in tasks or sorted(TASKS):
        made[task] = Path(folder) / task
        TASKS[task](made[task])
    return made


def training_text() -> Iterator[str]:
    """Every sentence that the tokenizers learn from: the training parts of the shipped text."""
    with (TEXT / "topics" / "train.csv").open(encoding="utf-8", newline="") as file:
        yield from (row["text"] for row in csv.DictReader(file))
    with (TEXT / "names" / "train.jsonl").open(encoding="utf-8") as file:
        yield from (" ".join(json.loads(line)["words"]) for line in file)
    with (TEXT / "alice" / "train.txt").open(encoding="utf-8") as file:
        yield from (line.rstrip("\n") for line in file)


def word_pieces() -> Any:
    """A tokenizer in the manner of BERT: words and pieces of words, [CLS] text [SEP]."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    normalizer, pre_tokenizer = normalizers.BertNormalizer(lowercase=False), pre_tokenizers.BertPreTokenizer()
    words = Counter(
        word for text in training_text() for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))
    )
    vocabulary = {token: number for number, token in enumerate([*special, *_frequent_pieces(words)])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=LONGEST,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def _frequent_pieces(words: Counter[str]) -> list[str]:
    """Every letter, the most frequent ends of words, and the most frequent words.

    The library's trainer of word pieces orders letters by a hash that differs from run to run; this one does not.
    """
    letters = sorted({letter for word in words for letter in word})
    ends: Counter[str] = Counter()
    for word, count in words.items():
        for length in range(2, min(5, len(word))):
            ends[f"##{word[-length:]}"] += count

    def most_frequent(counts: Counter[str]) -> list[str]:
        return sorted(counts, key=lambda piece: (-counts[piece], piece))

    pieces = [*letters, *(f"##{letter}" for letter in letters), *most_frequent(ends)[: VOCABULARY // 8]]
    return list(dict.fromkeys([*pieces, *most_frequent(words)]))[: VOCABULARY - 5]


def byte_pairs() -> Any:
    """A tokenizer in the manner of GPT-2: pairs of bytes, so that no text is unknown; one token ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    end = "<|endoftext|>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        training_text(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[end],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=LONGEST,
        model_input_names=["input_ids", "attention_mask"],
        bos_token=end,
        eos_token=end,
        pad_token=end,
    )


def sequence_classifier(folder: Path) -> None:
    """BERT for the topics of examples/text/topics."""
    from transformers import BertForSequenceClassification

    tokenizer = word_pieces()
    _save(lambda: BertForSequenceClassification(_bert(tokenizer, TOPICS)), folder, tokenizer)


def token_classifier(folder: Path) -> None:
    """BERT for the names of examples/text/names."""
    from transformers import BertForTokenClassification

    tokenizer = word_pieces()
    _save(lambda: BertForTokenClassification(_bert(tokenizer, TAGS)), folder, tokenizer)


def language_model(folder: Path) -> None:
    """Llama for prose such as examples/text/alice."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_pairs()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        initializer_range=SPREAD,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=LONGEST,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    _save(lambda: LlamaForCausalLM(config), folder, tokenizer)


def image_classifier(folder: Path) -> None:
    """ViT for small images of ten classes."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    config = ViTConfig(
        image_size=16,
        patch_size=4,
        num_channels=3,
        hidden_size=WIDTH,
        initializer_range=SPREAD,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        id2label={number: str(number) for number in range(10)},
        label2id={str(number): number for number in range(10)},
    )
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    _save(lambda: ViTForImageClassification(config), folder, processor)


def _bert(tokenizer: Any, labels: list[str]) -> Any:
    """No dropout: what is compared between strategies must not differ by it."""
    from transformers import BertConfig

    return BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        initializer_range=SPREAD,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=LONGEST,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
    )


def _save(build: Callable[[], Any], folder: Path, *processors: Any) -> None:
    """The model with weights of the fixed seed, and whatever makes its inputs, as `from_pretrained` reads them."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = build()
    for part in (model, *processors):
        part.save_pretrained(folder)


TASKS: dict[str, Callable[[Path], None]] = {
    "sequence-classification": sequence_classifier,
    "token-classification": token_classifier,
    "causal-lm": language_model,
    "image-classification": image_classifier,
}

if __name__ == "__main__":
    main()
