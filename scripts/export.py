"""Write the model of a run, or of one of its checkpoints, to a folder that transformers loads.

    python -m scripts.export --run base --to my_model
    python -m scripts.export --run base --to my_model --checkpoint last --dtype bfloat16

transformers also loads the folder of a finished run; this copies only what others need, without checkpoints
and logs.
"""

from pathlib import Path

from nanomuon import hf_export
from nanomuon.command import ArgumentParser, add_checkpoint_argument, add_run_argument, run_command
from nanomuon.runtime import start


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser("python -m scripts.export", __doc__)
    add_run_argument(parser)
    add_checkpoint_argument(parser)
    parser.add_argument("--to", required=True, type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="dtype of the weights (default: %(default)s, as trained)",
    )
    args = parser.parse_args(argv)
    hf_export.export_run(args.run, args.to, args.checkpoint, args.dtype, start("float32"))
    for file in sorted(args.to.iterdir()):
        print(f"{file.stat().st_size:13,}  {file.name}")
    print(f"export: {args.to} ({args.dtype})")


if __name__ == "__main__":
    run_command(main)
