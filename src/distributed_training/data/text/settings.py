"""What can be said about data of the `datasets` library: where it is, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from distributed_training.config.check import at_least
from distributed_training.runtime.errors import ConfigError

Task = Literal["sequence_classification", "token_classification", "causal_lm", "image_classification"]


@dataclass(kw_only=True)
class LoadSettings:
    """Where the samples are."""

    name: str | None = None
    """A dataset on the Hub, such as `stanfordnlp/imdb`. Left out: the files at `data.root`."""
    subset: str | None = None
    """Which of several configurations of a dataset on the Hub, such as `sst2` of `glue`."""
    revision: str | None = None
    """Branch, tag or commit on the Hub. A commit makes sure that it stays the same data."""
    format: Literal["csv", "json", "parquet", "text", "arrow", "imagefolder"] | None = None
    """Kind of the files. Left out: told by their names."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of that kind, such as `delimiter: ";"` of csv or `sample_by: paragraph` of text."""
    split: str = "train"
    """What to train on; parts and sums are allowed: `train[:80%]`, `train+extra`."""
    validation_split: str | None = None
    """What to validate on. Left out: `validation`, `val`, `dev` or `test` if there is one, else a part held out."""
    streaming: bool = False
    """Read over the network without downloading the whole: the first `samples` are kept on disk."""
    samples: int | None = None
    """Take only the first so many samples of each split."""

    def __post_init__(self) -> None:
        at_least("data.args.samples", self.samples, 1)
        if "token" in self.options:  # it would be written into the run's config
            raise ConfigError("data.args.options.token: a token is no setting; put HF_TOKEN into the environment")


@dataclass(kw_only=True)
class ProcessSettings:
    """What becomes of them."""

    task: Task = "sequence_classification"
    """What the model is for. Decides about inputs and labels."""
    text: str | None = None
    """Column of the text (of words, for token_classification). Left out: found by the usual names."""
    text_pair: str | None = None
    """Column of a second text that goes with the first."""
    image: str | None = None
    """Column of the image. Left out: `image` or `img`."""
    label: str | None = None
    """Column of the label (of a label for each word, for token_classification). Left out: found by the usual names."""
    labels: list[str] | None = None
    """Names of the classes in the order of their numbers. Left out: as the dataset has them, or sorted."""
    num_labels: int | None = None
    """Number of classes; a label beyond it is an error."""
    label_all_tokens: bool = False
    """token_classification: judge every piece of a word, not only the first."""
    max_length: int | None = None
    """Most tokens of a sample. Left out: what the model takes."""
    truncation: bool = False
    """Cut longer texts off. Otherwise they are an error that names the first."""
    padding: Literal["longest", "max_length", "none"] = "longest"
    """Fill samples up to the longest of their batch, or to `max_length`; none: they have to be of one length."""
    pad_to_multiple_of: int | None = None
    """Fill up to a multiple of this; 8 suits the matrix units of GPUs."""
    packing: bool = False
    """causal_lm: join all texts, an end-of-text token behind each, and cut blocks of `max_length` from that."""
    num_proc: int | None = None
    """Processes that tokenise. Left out: one, whose tokenizer uses all cores itself."""

    def __post_init__(self) -> None:
        at_least("data.args.max_length", self.max_length, 1)
        at_least("data.args.num_labels", self.num_labels, 1)
        at_least("data.args.pad_to_multiple_of", self.pad_to_multiple_of, 1)
        at_least("data.args.num_proc", self.num_proc, 1)
        if self.packing and self.task != "causal_lm":
            raise ConfigError(f"data.args.packing joins texts, which is of use for causal_lm only, not for {self.task}")
        if self.text_pair is not None and self.task != "sequence_classification":
            raise ConfigError(f"data.args.text_pair is for sequence_classification, not for {self.task}")


@dataclass(kw_only=True)
class HuggingFaceArguments(LoadSettings, ProcessSettings):
    """`data.args` of huggingface."""

    tokenizer: str | None = None
    """Tokenizer or image processor: a name on the Hub or a folder; usually `${model.args.checkpoint}`."""
    tokenizer_revision: str | None = None
    """Its branch, tag or commit on the Hub."""

    def __post_init__(self) -> None:
        LoadSettings.__post_init__(self)
        ProcessSettings.__post_init__(self)
