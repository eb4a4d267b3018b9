"""Write a finished run as a folder that the transformers library loads.

python -m scripts.export --run base --to my_model
python -m scripts.export --run base --to my_model --dtype bfloat16

AutoModelForCausalLM.from_pretrained("my_model", trust_remote_code=True) then runs the folder's Python file,
modeling_nanomuon.py. Writing the folder, and loading the run with this repo, runs no code from it.
"""

from pathlib import Path

from nanomuon import hf_export
from nanomuon.model_card import SUMMARY
from nanomuon.read_json import read_json
from nanomuon.run_folder import find_run
from nanomuon.runtime import check_output, run_command
from scripts.arguments import ArgumentParser, add_run_argument


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser("python -m scripts.export", __doc__)
    add_run_argument(parser)
    parser.add_argument("--to", required=True, metavar="FOLDER", help="a new folder")
    parser.add_argument(
        "--dtype",
        choices=list(hf_export.DTYPES),
        help="of the weights (default: what the run computed in; float32 is what was trained)",
    )
    args = parser.parse_args(argv)
    folder = Path(args.to)
    run_dir = find_run(args.run)
    check_output("--to", folder)
    summary = {}
    if (run_dir / "summary.json").exists():
        summary = read_json(run_dir / "summary.json", SUMMARY)
    dtype = args.dtype or summary.get("dtype")
    if dtype not in hf_export.DTYPES:
        dtype = "float32"
    hf_export.export_run(run_dir, folder, dtype, summary)
    for file in sorted(folder.iterdir()):
        print(f"{file.stat().st_size:13,}  {file.name}")
    print(f"export: {folder} ({dtype})")


if __name__ == "__main__":
    run_command(main)
