"""Write the model of a run, or of one of its checkpoints, to a folder that transformers can load.

    python -m scripts.export --run base --to my_model
    python -m scripts.export --run base --to my_model --checkpoint last --dtype bfloat16

transformers can also load the folder of a finished run. This command writes only what others need, without
checkpoints and logs.
"""

if __name__ == "__main__":
    import scripts

    scripts.begin()

from pathlib import Path

from nanomuon import hf_export
from nanomuon.command import ArgumentParser, add_run_arguments, run_command
from nanomuon.runtime import InputError, on_first_rank, rank, start
from nanomuon.trained import load_run


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser("python -m scripts.export", __doc__)
    add_run_arguments(parser)
    parser.add_argument("--to", required=True, type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="dtype of the weights (default: %(default)s, as trained)",
    )
    args = parser.parse_args(argv)
    folder, runtime = args.to, start("float32")
    # One rank looks: another might find what the first has written already
    if on_first_rank(lambda: folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise InputError(f"{folder} exists and is not an empty folder: choose a new one")
    model, tokenizer, _ = load_run(args.run, runtime, args.checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    hf_export.export(folder, model, tokenizer, args.dtype)
    if rank() == 0:
        for file in sorted(folder.iterdir()):
            print(f"{file.stat().st_size:13,}  {file.name}")
        print(f"export: {folder} ({args.dtype}); its README.md shows how to use it with transformers")


if __name__ == "__main__":
    run_command(main)
