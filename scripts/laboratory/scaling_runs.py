"""A family of runs that differ in depth and tokens alone: which there are, training those that are missing,
what each came to.

A family lives in scaling/NAME under NANOMUON_BASE_DIR: family.json holds what its runs share, d2-t500000.json
what one of them came to, d2-t500000.log what it printed. The run itself is runs/NAME-d2-t500000, a run like
any other: base_train starts it, resumes it, and knows when it is finished.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from nanomuon import (
    gpt,
    head_loss,
    locks,
    moe,
    optim,
    orthogonalize,
    param_groups,
    recipe,
    report,
    run_folder,
    schedule,
    user_file,
)
from nanomuon.corpus import open_corpus
from nanomuon.export import MODEL_OPTIONS, MODEL_SHAPE
from nanomuon.gpt import GPTConfig
from nanomuon.planning import duration, meta_model
from nanomuon.read_json import MapOf, Number, OrNull, Record, Scalar, Text, Whole, read_json
from nanomuon.runtime import STOPPED, InputError, base_dir, flag_of, write_json
from scripts.laboratory.scaling import Point, Size

RESULT = Record(
    {
        "depth": Whole(1, 1024),
        "asked_tokens": Whole(1),
        "tokens": Whole(1),
        "val_bpb": Number(0),
        "parameters": Whole(1),
        "flops_per_token": Whole(1),
        "tokens_per_second": OrNull(Number(0)),
        "processes": Whole(1),
        "dtype": Text(32),
        "model": Record(MODEL_SHAPE, MODEL_OPTIONS),
    },
    others=Scalar(),
)
FAMILY = Record({"options": MapOf(Scalar())}, others=Scalar())
SUMMARY = Record(
    {"steps": Whole(1), "tokens": Whole(1), "seconds": Number(0), "dtype": Text(32)}, others=Scalar()
)
SETTINGS_OF_A_FAMILY = ("corpus", "max_seq_len", "total_batch_size")  # flags of scripts.scaling itself
# What decides the numbers of a run besides its settings
CODE = (gpt, head_loss, moe, optim, orthogonalize, param_groups, recipe, schedule)
# Arguments of base_train that change nothing of what a run comes to, or no more than rounding does
WITHOUT_EFFECT = (
    *(name for name in run_folder.OF_THE_LAUNCH if name != "optimizer_file"),
    "device_batch_size",
    "comm_dtype",
    "compile",
    "deterministic",
    "eval_every",
    "eval_tokens",
    "core_bundle",
    "core_every",
    "core_items",
    "save_every",
    "save_minutes",
    "keep_last",
)


@dataclass(frozen=True)
class Member:
    """A run of a family, before it is trained."""

    depth: int
    tokens: int  # that were asked for
    batch: int  # tokens per optimizer step

    @property
    def steps(self) -> int:
        return max(1, round(self.tokens / self.batch))

    @property
    def name(self) -> str:
        return f"d{self.depth}-t{self.tokens}"


def members(
    depths: list[int], tokens: list[int], total_batch_size: int | None, row_tokens: int
) -> list[Member]:
    """Every depth with every number of tokens, about the cheapest first.

    total_batch_size: of all; None: by base_train's rule for so many tokens. row_tokens: of one row on every
    process, which divides a batch.
    """
    planned = []
    for count in set(tokens):
        batch = total_batch_size or schedule.total_batch_size(count, row_tokens)
        planned += [Member(depth, count, batch) for depth in set(depths)]
    return sorted(planned, key=lambda member: (member.tokens * member.depth, member.depth))


def folder_of(name: str) -> Path:
    return base_dir() / "scaling" / name


def settings_of(args: argparse.Namespace, options: dict) -> dict:
    """What all runs of a family share, for family.json. args: of scripts.scaling. options: arguments of
    base_train that are not at their default.
    """
    shared = {key: getattr(args, key) for key in SETTINGS_OF_A_FAMILY}
    shared["options"] = {key: value for key, value in options.items() if key not in WITHOUT_EFFECT}
    if "optimizer_file" in options:
        source = user_file.read_source(options["optimizer_file"])
        shared["optimizer_file_sha256"] = hashlib.sha256(source).hexdigest()
    return shared


def surroundings(corpus: str) -> dict:
    """What may change between two launches though the settings do not: the documents, and the code."""
    code = hashlib.sha256()
    for module in CODE:
        code.update(Path(module.__file__).read_bytes())
    return {"revision": open_corpus(corpus).revision, "code": code.hexdigest()[:12]}


def read_results(folder: Path) -> list[dict]:
    """What the finished runs of a family came to, the smallest first."""
    results = []
    for file in sorted(folder.glob("d*-t*.json")):
        results.append(read_json(file, RESULT, advice="remove it, and that run is trained again"))
    return sorted(results, key=lambda result: (result["depth"], result["tokens"]))


def points(results: list[dict]) -> list[Point]:
    found = []
    for result in results:
        size = Size(result["depth"], result["parameters"], result["flops_per_token"])
        found.append(Point(size, result["tokens"], result["val_bpb"]))
    return found


def size_of(config: GPTConfig) -> Size:
    model = meta_model(config)
    counts = model.parameter_counts()
    return Size(config.depth, counts["matrices"] + counts["lm_head"], model.estimate_flops())


def size_at(depth: int, model: dict) -> Size | None:
    """The model of the family at this depth, None where its channels do not divide by --experts-per-token.

    model: fields of GPTConfig of any model of the family.
    """
    shared = {name: model[name] for name in MODEL_OPTIONS if name in model}
    try:
        return size_of(GPTConfig.from_depth(depth, model["vocab_size"], model["seq_len"], **shared))
    except ValueError:
        return None


def sizes_up_to(depth: int, model: dict) -> list[Size]:
    """The models of the family from depth 1 to this one; see size_at."""
    sizes = [size_at(each, model) for each in range(1, depth + 1)]
    return [size for size in sizes if size is not None]


def check_settings(folder: Path, shared: dict) -> None:
    """InputError where the family in this folder was trained with other settings."""
    before = read_family(folder)
    if before is None:
        return
    changed = []
    for key in SETTINGS_OF_A_FAMILY:
        changed += difference(flag_of(key), before.get(key), shared.get(key))
    for key in sorted({*before["options"], *shared["options"]}):
        changed += difference(flag_of(key), before["options"].get(key), shared["options"].get(key))
    text = "the text of its optimizer file,"
    changed += difference(text, before.get("optimizer_file_sha256"), shared.get("optimizer_file_sha256"))
    if changed:
        raise InputError(f"family {folder.name} was trained with {'; '.join(changed)}: choose another --name")


def check_surroundings(folder: Path, now: dict, accept: bool) -> None:
    """InputError where documents or code are not those that the family has been trained with so far."""
    before = read_family(folder)
    if before is None or accept:
        return
    changed = difference("revision of its corpus", before.get("revision"), now["revision"])
    changed += difference("code", before.get("code"), now["code"])
    if changed:
        raise InputError(
            f"family {folder.name} was trained with {'; '.join(changed)}: --accept-changes goes on, another "
            "--name starts anew"
        )


def read_family(folder: Path) -> dict | None:
    """What family.json holds; None for a family that does not exist yet, or of which no run has begun."""
    file = folder / "family.json"
    runs_begun = run_folder.folder_of(folder.name).parent.glob(f"{folder.name}-d*-t*")
    if not os.path.lexists(file) or not (any(runs_begun) or any(folder.glob("d*-t*.json"))):
        return None
    return read_json(file, FAMILY)


def difference(name: str, before, now) -> list[str]:
    """In words, if there is one; None stands for what was not given."""
    if before == now:
        return []
    described = ["its default" if value is None else str(value) for value in (before, now)]
    return [f"{name} {described[0]}, not {described[1]}"]


def train_missing(
    folder: Path, shared: dict, planned: list[Member], flags: list[str], processes: int, accept: bool
) -> None:
    """Train those of `planned` that have no result in `folder` yet, and keep what each came to.

    shared: see settings_of. flags: of base_train, beside those that are a family's. accept: see
    check_surroundings. InputError where a run fails.
    """
    pending = [member for member in planned if not (folder / f"{member.name}.json").exists()]
    done = len(planned) - len(pending)
    if done:
        print(f"{done} of {len(planned)} runs are there already", flush=True)
    if not pending:
        return
    now = surroundings(shared["corpus"])
    check_surroundings(folder, now, accept)
    if read_family(folder) is None:
        check_no_strangers(folder, planned)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "family.json", {**shared, **now})
    print(f"results in {folder}, and what each run prints, d*-t*.log", flush=True)
    for number, member in enumerate(pending):
        results = read_results(folder)
        print(
            f"[{done + 1}/{len(planned)}] depth {member.depth}: {member.steps} steps of {member.batch:,} "
            f"tokens{expected(pending[number:], results)}",
            flush=True,
        )
        dtype = []
        if results:
            dtype = ["--dtype", results[0]["dtype"]]  # "auto" measures, and could come to another one
        try:
            train(folder, member, shared, [*flags, *dtype], processes)
        except (KeyboardInterrupt, SystemExit) as error:
            message = f"stopped: {done} of {len(planned)} runs are kept, the same command goes on"
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(message) from None
            print(message, flush=True)
            raise
        result = outcome(folder, member, processes)
        write_json(folder / f"{member.name}.json", result)
        done += 1
        print(
            f"[{done}/{len(planned)}] depth {member.depth}, {result['tokens']:,} tokens, "
            f"{result['flops']:.3g} FLOPs: {result['val_bpb']:.4f} bits per byte after "
            f"{duration(result['seconds'])}",
            flush=True,
        )


def check_no_strangers(folder: Path, planned: list[Member]) -> None:
    """InputError where a run has the name that one of a new family would get."""
    for member in planned:
        run = f"{folder.name}-{member.name}"
        if run_folder.folder_of(run).exists():
            raise InputError(
                f"{run_folder.folder_of(run)} exists and is not of this family: choose another --name, or "
                "remove it"
            )


def expected(pending: list[Member], results: list[dict]) -> str:
    """In words, how long the next run takes and how long all of them; "" where nothing was measured yet."""
    seconds = [expected_seconds(member, results) for member in pending]
    if None in seconds:
        return ""
    if len(seconds) == 1:
        return f", about {duration(seconds[0])}"
    return f", about {duration(seconds[0])}; all that are left about {duration(sum(seconds))}"


def expected_seconds(member: Member, results: list[dict]) -> float | None:
    """Of training, by the FLOP/s of the finished run that is next to it in depth; None where none tells."""
    known = [result for result in results if result["tokens_per_second"]]
    if not known:
        return None
    near = min(known, key=lambda result: abs(result["depth"] - member.depth))
    size = size_at(member.depth, near["model"])
    if size is None:
        return None
    flops = member.steps * member.batch * size.flops_per_token
    return flops / (near["tokens_per_second"] * near["flops_per_token"])


def train(folder: Path, member: Member, shared: dict, flags: list[str], processes: int) -> None:
    """Train one run to its end with base_train, in a process of its own.

    InputError where that fails, with the line in which it says why. Where this process or that one is asked
    to stop, the run is saved first; KeyboardInterrupt or SystemExit tells.
    """
    run = f"{folder.name}-{member.name}"
    wait_for_another(run)
    log = folder / f"{member.name}.log"
    command = training_command(run, member, shared, flags, processes)
    with open(log, "ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        except BaseException:  # asked to stop
            process.send_signal(signal.SIGTERM)  # it saves first
            process.wait()
            raise
    # Ranks under torchrun end with 0 where they are asked to stop
    if code == STOPPED or (code == 0 and (run_folder.folder_of(run) / "stopped").exists()):
        raise SystemExit(STOPPED)
    if code != 0:
        raise InputError(f"run {run} ended with exit code {code}: {last_line(log)} (all it said: {log})")


def training_command(run: str, member: Member, shared: dict, flags: list[str], processes: int) -> list[str]:
    module = ["-m", "scripts.base_train"]
    if processes > 1:
        # --local_addr: not every container resolves the machine's name
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local_addr=localhost"]
        module = [*torchrun, f"--nproc_per_node={processes}", *module, "--"]
    own = {
        "--run": run,
        "--corpus": shared["corpus"],
        "--max-seq-len": shared["max_seq_len"],
        "--depth": member.depth,
        "--total-batch-size": member.batch,
        "--num-iterations": member.steps,
        "--eval-every": -1,  # at the end, on the whole set, is enough; what is in `flags` counts more
        "--keep-last": 1,
    }
    command = [sys.executable, *module]
    for flag, value in own.items():
        command += [flag, str(value)]
    return [*command, *flags]


def wait_for_another(run: str) -> None:
    """Wait while another process trains this run: one whose command was killed, say."""
    run_dir = run_folder.folder_of(run)
    if locks.being_written(run_dir):
        print(f"{locks.holder(run_dir)} is training {run}: waiting for it", flush=True)
    while locks.being_written(run_dir):
        time.sleep(0.2)


def last_line(log: Path) -> str:
    """Where base_train says why it ended: its last line with "error:", else its last."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("error: ")


def outcome(folder: Path, member: Member, processes: int) -> dict:
    """What a finished run came to, of JSON types."""
    run_dir = run_folder.folder_of(f"{folder.name}-{member.name}")
    settings = run_folder.read_settings(run_dir)
    summary = read_json(run_dir / "summary.json", SUMMARY)
    _, evaluations = report.read_metrics(run_dir / "metrics.jsonl")
    val_bpb = summary["val_bpb"]
    for row in evaluations:
        if row.get("whole_set") and row["step"] == summary["steps"]:
            val_bpb = row["val_bpb"]  # with all its digits
    config = GPTConfig(**{field.name: settings[field.name] for field in fields(GPTConfig)})
    size = size_of(config)
    return {
        "depth": member.depth,
        "asked_tokens": member.tokens,
        "tokens": summary["tokens"],
        "steps": summary["steps"],
        "val_bpb": val_bpb,
        "parameters": size.parameters,
        "flops_per_token": size.flops_per_token,
        "flops": size.flops_per_token * summary["tokens"],
        "seconds": summary["seconds"],
        "tokens_per_second": summary["tokens_per_second"],
        "processes": processes,
        "dtype": summary["dtype"],
        "machine": report.machine_description(),
        "commit": settings.get("trained_with", {}).get("commit"),
        "model": asdict(config),
    }
