"""Check this machine's GPUs, and this repo on them, in minutes: what works, how exactly, how fast.

    python -m scripts.gpu_check                        # all GPUs of this machine, about 8 minutes on an H100
    python -m scripts.gpu_check --list                 # the stages
    python -m scripts.gpu_check --only numerics,fsdp
    python -m scripts.gpu_check --device cpu           # the same on a CPU, smaller: 3 minutes

Every stage (scripts/gpu_stages.py) runs in processes of its own and is killed at its time limit, so that a
failure, a crash or a hang of one hides no other. gpu_check.json and gpu_check.md hold what was found, logs/
what the stages printed: send the three with a bug report. The same command again goes on with the stages that
are missing; after a change of versions, GPUs or this repo it starts over. Nothing is downloaded. Under
torchrun the first rank does all of it with as many GPUs as there are local ranks; what goes between machines
is not tried.
Exit code: 0 where nothing failed, 1 where something did or is missing for lack of time.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import torch

from nanomuon.arguments import ArgumentParser
from nanomuon.report import machine_description
from nanomuon.runtime import InputError, base_dir, check_output_folder, run_command, write_json, write_text
from scripts import gpu_stages
from scripts.gpu_common import ROOT

MINUTES = 8  # for all stages together
MINUTES_A_LAYOUT = 2  # more for each of these, where there are GPUs for it
EXTRA_LAYOUTS = ("fsdp", "tensor_parallel", "fsdp_and_tensor_parallel")
SLOWER = 2  # the stages' time limits on a CPU, which others may use as well
PACKAGES = ("triton", "numpy", "torchao", "flash-attn", "tiktoken", "rustbpe", "safetensors")
# What torchrun tells its ranks, which the processes of the stages must not read
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PREFIXES_OF_TORCHRUN = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
SHOWN_VARIABLES = ("CUDA_", "NCCL_", "NANOMUON_", "OMP_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.list:
        for stage in gpu_stages.STAGES:
            print(f"{stage.name:26} {stage.about}")
        return 0
    if os.environ.get("RANK", "0") != "0":
        return 0  # the first rank starts processes for all GPUs of its machine by itself
    chosen = choose(args.only)
    folder = args.out or base_dir() / "gpu_check"
    check_output_folder("--out", folder)
    device = args.device or ("cuda" if gpus_seen() else "cpu")
    if args.device == "cuda" and not gpus_seen():
        raise InputError("--device cuda: no GPU is seen here; --device cpu checks what a CPU can")
    folder.mkdir(parents=True, exist_ok=True)
    ranks = count_ranks(device)
    checked = {"device": device, "processes": ranks, **versions(device)}
    results = {} if args.again and not args.only else earlier_results(folder, checked)
    if args.again:
        results = {name: result for name, result in results.items() if name not in chosen}
    print(f"{machine_description()}\n{ranks} x {device}, into {folder}", flush=True)

    minutes = args.minutes
    if minutes is None:
        layouts = [name for name in EXTRA_LAYOUTS if ranks > 1 and name in chosen]
        minutes = MINUTES + MINUTES_A_LAYOUT * len(layouts)
    deadline = time.monotonic() + 60 * minutes
    work = folder / "work"
    with terminated_as_interrupted():
        for stage in gpu_stages.STAGES:
            if stage.name not in chosen:
                continue
            if stage.name in results:
                print(f"{stage.name:26} {results[stage.name]['result']}, done before (--again repeats it)")
                continue
            if stage.for_gpus and device == "cpu":
                line = {"name": stage.name, "result": "skipped", "found": "needs a GPU", "allowed": ""}
                results[stage.name] = {"result": "skipped", "seconds": 0, "killed": False, "lines": [line]}
                print_result(stage.name, results[stage.name])
                continue
            command = stage_command(stage, device, ranks, work)
            left = deadline - time.monotonic()
            limit = stage.seconds * (SLOWER if device == "cpu" else 1)
            result = run_stage(stage.name, command, min(limit, left), folder)
            if result["killed"] and left < limit:
                print(f"{stage.name:26} not reached within {minutes:g} minutes")
                continue
            results[stage.name] = result
            write_results(folder, checked, results)
            print_result(stage.name, result)
            if stage.name == "device" and result["result"] == "FAIL" and not computes(result):
                print("the device does not compute: nothing else is tried")
                return 1
    missing = [name for name in chosen if name not in results]
    if not missing and not args.only:
        shutil.rmtree(work, ignore_errors=True)
    write_results(folder, checked, results)
    verdict = verdict_of(results)
    print(f"{verdict}: {folder}/gpu_check.md")
    if missing:
        print(f"not done yet: {', '.join(missing)}; the same command goes on with them")
    return 1 if missing or verdict == "FAIL" else 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser("python -m scripts.gpu_check", __doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], help="default: cuda where a GPU is seen")
    add("--only", help="names of stages, with commas between them (default: all of --list)")
    add("--again", action="store_true", help="repeat stages that are done")
    add("--list", action="store_true", help="print the stages and stop")
    add("--out", type=Path, help="folder to write to (default: gpu_check under the base folder)")
    add("--minutes", type=float, help="for all stages together (default: 8, and 2 for each extra layout)")
    args = parser.parse_args(argv)
    if args.minutes is not None and not args.minutes > 0:
        raise InputError(f"--minutes must be above 0, not {args.minutes}")
    return args


def choose(only: str | None) -> list[str]:
    """Names of the stages to run, in their order. InputError for a name that there is not."""
    known = [stage.name for stage in gpu_stages.STAGES]
    if only is None:
        return known
    asked = [name.strip() for name in only.split(",")]
    for name in asked:
        if name not in known:
            raise InputError(f"--only {name}: there is no such stage; there are {', '.join(known)}")
    return [name for name in known if name in asked]


# ------------------------------------------------------------------------------------------------------------
# The machine


def nvidia_smi(query: str) -> list[str]:
    """A line for each GPU that the driver shows; none without a driver."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def gpus_seen() -> bool:
    """Whether there is a GPU, also one that this PyTorch cannot use: the first stage says why."""
    return torch.cuda.is_available() or bool(nvidia_smi("name"))


def count_ranks(device: str) -> int:
    """How many processes the stages for several devices start."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        local, world = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        if local < world:
            print(f"{world} ranks, of which {local} are on this machine: only its GPUs are tried")
        return local
    return max(1, torch.cuda.device_count()) if device == "cuda" else 2


def versions(device: str) -> dict:
    """Of everything that results may depend on. Nothing here starts CUDA, which might hang."""
    found = {
        "nanomuon": repository_version(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": str(torch.__version__),
    }
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if device == "cuda":
        found["CUDA of torch"] = torch.version.cuda or "none: a build for CPUs"
        if torch.version.cuda:
            found["cuDNN"] = str(torch.backends.cudnn.version())
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        gpus = nvidia_smi("name,compute_cap,memory.total,driver_version")
        found["GPUs: name, capability, memory, driver"] = gpus or "nvidia-smi says nothing"
    variables = {}
    for name in sorted(os.environ):
        if name.startswith(SHOWN_VARIABLES) and not name.startswith(PREFIXES_OF_TORCHRUN):
            variables[name] = os.environ[name]
    found["environment"] = variables
    return found


def repository_version() -> str:
    """The commit, with a checksum of what was changed since; the package's version without git."""

    def git(*arguments):
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    with contextlib.suppress(OSError):
        if commit := git("rev-parse", "--short=12", "HEAD"):
            changes = git("diff", "HEAD")
            return f"{commit}+{zlib.crc32(changes.encode()):08x}" if changes else commit
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("nanomuon")
    return "unknown"


# ------------------------------------------------------------------------------------------------------------
# A stage


def stage_command(stage: gpu_stages.Stage, device: str, ranks: int, work: Path) -> list[str]:
    command = [sys.executable, "-m", "scripts.gpu_stages", stage.name, "--device", device]
    return [*command, "--ranks", str(ranks), "--folder", str(work)]


def run_stage(name: str, command: list[str], seconds: float, folder: Path) -> dict:
    """Run a stage's command, and kill it and all that it started after so many seconds.

    Its lines come from a file that it writes as it goes. A crash and a kill are lines of their own, so that
    what was found before counts. Returns {result, seconds, killed, lines}.
    """
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    log, lines_file = logs / f"{name}.txt", logs / f"{name}.jsonl"
    lines_file.unlink(missing_ok=True)
    began, killed, code = time.monotonic(), False, None
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--lines", str(lines_file)],
            cwd=ROOT,
            env=stage_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a process group of its own, which is killed as one
        )
        try:
            code = process.wait(max(seconds, 0.01))
        except subprocess.TimeoutExpired:
            killed = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what a stage that crashed has left behind
            process.wait()
    lines = []
    if lines_file.exists():
        for text in lines_file.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last one may be torn
                lines.append(json.loads(text))
        lines_file.unlink()
    if killed:
        lines.append(failure("ends in time", f"killed after {seconds:.0f} s; see logs/{name}.txt"))
    elif code != 0:
        said = log.read_text(errors="replace").strip().splitlines()
        last = said[-1][:200] if said else "no word"
        lines.append(failure("ends well", f"exit code {code}: {last}; see logs/{name}.txt"))
    elif not lines:
        lines.append(failure("finds something", "it said nothing"))
    seconds = round(time.monotonic() - began, 1)
    return {"result": result_of(lines), "seconds": seconds, "killed": killed, "lines": lines}


def failure(name: str, found: str) -> dict:
    return {"name": name, "result": "FAIL", "found": found, "allowed": ""}


def result_of(lines: list[dict]) -> str:
    """FAIL where a line failed, skipped where none passed."""
    results = {line["result"] for line in lines}
    if "FAIL" in results:
        return "FAIL"
    return "PASS" if "PASS" in results else "skipped"


def computes(result: dict) -> bool:
    """Whether the first stage has seen a correct matrix product."""
    passed = [line["name"] for line in result["lines"] if line["result"] == "PASS"]
    return any(name.startswith("matrix product") for name in passed)


def stage_environment() -> dict[str, str]:
    """This process's, without what torchrun told it; what is compiled the stages decide themselves."""
    environment = {}
    for name, value in os.environ.items():
        if name not in (*OF_TORCHRUN, "NANOMUON_COMPILE") and not name.startswith(PREFIXES_OF_TORCHRUN):
            environment[name] = value
    return environment


@contextlib.contextmanager
def terminated_as_interrupted():
    """SIGTERM ends a stage's processes as Ctrl-C does: they are in a session of their own."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ------------------------------------------------------------------------------------------------------------
# What was found


def earlier_results(folder: Path, checked: dict) -> dict:
    """{stage: result} of gpu_check.json, where it is of the same machine and versions."""
    file = folder / "gpu_check.json"
    if not file.exists():
        return {}
    try:
        earlier = json.loads(file.read_text())
        same = earlier["checked"] == checked
    except (ValueError, KeyError, TypeError):
        print(f"{file} is not what was written: starting over")
        return {}
    if not same:
        print("versions, device or environment have changed: starting over")
        return {}
    return earlier["stages"]


def verdict_of(results: dict) -> str:
    return "FAIL" if any(result["result"] == "FAIL" for result in results.values()) else "PASS"


def print_result(name: str, result: dict) -> None:
    counts = []
    for kind in ("PASS", "FAIL", "skipped"):
        number = sum(line["result"] == kind for line in result["lines"])
        if number:
            counts.append(f"{number} {kind}")
    print(f"{name:26} {result['result']:8} {result['seconds']:6.1f} s   {', '.join(counts)}")
    for line in result["lines"]:
        if line["result"] == "FAIL":
            print(f"    FAIL {line['name']}: {line['found']} {line['allowed']}")
    sys.stdout.flush()


def write_results(folder: Path, checked: dict, results: dict) -> None:
    """gpu_check.json, and the same to read."""
    verdict = verdict_of(results)
    write_json(folder / "gpu_check.json", {"verdict": verdict, "checked": checked, "stages": results})
    parts = [f"# gpu_check: {verdict}"]
    rows = []
    for name, result in results.items():
        rows.append((name, result["result"], f"{result['seconds']:.1f}"))
    parts.append(table(("stage", "result", "seconds"), rows))
    failed = []
    for name, result in results.items():
        for line in result["lines"]:
            if line["result"] == "FAIL":
                failed.append((name, line["name"], line["found"], line["allowed"]))
    if failed:
        parts += ["## What failed", table(("stage", "line", "found", "allowed"), failed)]
    rows = []
    for name, value in checked.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key}={setting}" for key, setting in value.items())
        elif isinstance(value, list):
            value = "; ".join(value)
        rows.append((name, value))
    parts += ["## On", table(("", ""), rows)]
    for name, result in results.items():
        rows = []
        for line in result["lines"]:
            rows.append((line["result"] or "figure", line["name"], line["found"], line["allowed"]))
        parts += [f"## {name}", table(("", "", "found", "allowed"), rows)]
    write_text(folder / "gpu_check.md", "\n\n".join(parts) + "\n")


def table(header: tuple, rows: list[tuple]) -> str:
    """In Markdown."""
    lines = []
    for row in (header, ("---",) * len(header), *rows):
        cells = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
