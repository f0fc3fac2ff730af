"""Render sessions and write MDS shards: the third stage of data preparation.

    python data_prep/write_shards.py sessions.jsonl -o shards --holdout iniconfig
    python data_prep/write_shards.py sessions.jsonl -o shards --max-tokens 2048 --tokenizer path/to/model

The same function as ``agentft shards write``, which takes the text section from a run's YAML instead.
"""

import argparse

from agentft.config.schema import FeedbackPositionsConfig, TextConfig
from agentft.data.shards import write_shards


def main() -> None:
    """Parse the arguments, write, print what was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sessions", nargs="+", help="files of ETAI records (.jsonl, .jsonl.gz, .jsonl.zst)")
    parser.add_argument("-o", "--output", required=True, help="folder to write")
    parser.add_argument("--holdout", action="append", default=[], help="repository that goes to the test split whole")
    parser.add_argument("--val-share", type=float, default=0.0, help="with a holdout: share of the rest for val")
    parser.add_argument("--tokenizer", default="train", help="folder or hub name; `train` learns one from the data")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, default=TextConfig.max_tokens, help="longest session in tokens")
    parser.add_argument("--no-handles", action="store_true", help="copy paths and lines instead of pointing at them")
    arguments = parser.parse_args()

    report = write_shards(
        arguments.sessions,
        arguments.output,
        text=TextConfig(max_tokens=arguments.max_tokens, handles=not arguments.no_handles),
        positions=FeedbackPositionsConfig(),
        tokenizer=arguments.tokenizer,
        vocab_size=arguments.vocab_size,
        holdout=arguments.holdout,
        val_share=arguments.val_share,
        progress=True,
    )
    for split, part in report.meta.splits.items():
        print(f"{split}: {part.sessions} sessions, {part.trained_tokens} trained tokens, {part.shards} shards")
    print(f"{len(report.rejected)} sessions left out, {report.unreadable} lines unreadable")


if __name__ == "__main__":
    main()
