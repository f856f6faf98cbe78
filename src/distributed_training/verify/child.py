"""What `dtrain verify` runs for a config: `python -m distributed_training.verify.child [CONFIG] [KEY=VALUE]...`

It is what `dtrain train` does, without validation, report and farewell.
"""

from __future__ import annotations

import sys

from distributed_training.config.load import default_file, export_dotenv, load_config
from distributed_training.runtime.threads import keep_waits_short
from distributed_training.training.job import build_job


def main(words: list[str]) -> None:
    """Train as the words say. A first word without `=` is the config file."""
    keep_waits_short()
    export_dotenv()
    named = words[:1] if words and "=" not in words[0] else []
    with build_job(load_config(named[0] if named else default_file(), words[len(named) :])) as job:
        job.trainer.train(job.train_data)


if __name__ == "__main__":
    main(sys.argv[1:])
