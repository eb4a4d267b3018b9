"""Stages of scripts/gpu_check: runs of base_train that learn, that are killed, that run out of memory."""

import json
import math
import shutil
import signal

import torch

from nanomuon import fp8
from nanomuon.gpt import GPTConfig
from scripts.gpu_common import (
    FIRST_TEN,
    LAST_TEN,
    Lines,
    Place,
    base_train_command,
    data_flags,
    largest,
    losses,
    mean_of_last_ten,
    metrics,
    planned_bytes,
    run_to_end,
    training_flags,
)


def training(place: Place, lines: Lines) -> None:
    """A hundred steps of base_train from a checkpoint of the CPU, ten of them against the CPU in float32.

    Devices draw other weights from the same seed, so the CPU makes the first five steps and saves.
    """
    train_on_cpu(place, lines)
    shutil.copytree(place.folder / "runs" / "on-cpu", place.folder / "runs" / "from-cpu")
    flags = training_flags(place, "from-cpu")
    [code], output = run_to_end(place, base_train_command([*flags, "--resume", "step_5"]))
    print(output)
    lines.check("base_train carries on to step 100", code == 0, f"exit code {code}")
    curve, expected = losses(place, "from-cpu"), losses(place, "on-cpu")
    if len(curve) < 15 or len(expected) < 15:
        return
    errors = [abs(a - b) for a, b in zip(curve[5:15], expected[5:15], strict=True)]
    limit = FIRST_TEN[place.device.type]
    lines.at_most("losses of steps 6 to 15 against the CPU, in nats", largest(errors), limit)
    check_learning(curve, place, lines)
    check_fp8_run(mean_of_last_ten(curve), place, lines)


def train_on_cpu(place: Place, lines: Lines) -> None:
    """Fifteen steps or a few more of the run `on-cpu`, with a checkpoint of step 5."""
    # In micro-steps of half the rows, so that a comparison of CPUs has something to compare
    flags = [*training_flags(place, "on-cpu", parts=2, compiles=False), "--dtype", "float32"]
    flags += ["--save-every", "5", "--keep-last", "100"]  # the first one is what the device goes on from
    folder = place.folder / "runs" / "on-cpu"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(place.folder / "runs" / "from-cpu", ignore_errors=True)  # of an earlier try

    def fifteen_steps_made():
        return len(losses(place, "on-cpu")) >= 15

    command = base_train_command(flags)
    _, output = run_to_end(place, command, device_type="cpu", kill_when=fifteen_steps_made)
    print(output)
    saved = (folder / "checkpoints" / "step_5").exists()
    made = f"{len(losses(place, 'on-cpu'))} steps, step_5 saved: {saved}"
    lines.check("fifteen steps on the CPU", fifteen_steps_made() and saved, made)


def check_learning(curve: list[float], place: Place, lines: Lines) -> None:
    """curve: the losses of the run `from-cpu`."""
    finite = all(math.isfinite(loss) for loss in curve)
    skipped = metrics(place, "from-cpu")[-1]["skipped_steps"]
    lines.check("losses are finite, no step is skipped", finite and skipped == 0, f"{skipped} skipped")
    first, last = curve[0], mean_of_last_ten(curve)
    learnt = len(curve) == 100 and first - last > 1.0
    lines.check("the model learns", learnt, f"{first:.3f} to {last:.3f} at step {len(curve)}", "1 nat less")
    summary = place.folder / "runs" / "from-cpu" / "summary.json"
    if summary.exists():
        found = json.loads(summary.read_text())
        for key in ("val_bpb", "tokens_per_second", "optimizer_ms", "peak_memory_mb"):
            lines.figure(key, str(found[key]))


def check_fp8_run(bf16_loss: float, place: Place, lines: Lines) -> None:
    """bf16_loss: mean of the last ten steps without --fp8."""
    if not place.on_gpu or torch.cuda.get_device_capability() < fp8.CAPABILITY:
        lines.skip("fp8", "needs a GPU of capability 8.9 or more")
        return
    [code], output = run_to_end(place, base_train_command([*training_flags(place, "fp8"), "--fp8"]))
    print(output)
    lines.check("fp8: a hundred steps", code == 0, f"exit code {code}")
    curve = losses(place, "fp8")
    if len(curve) == 100:  # other initial weights, which matter less than this
        off = abs(mean_of_last_ten(curve) - bf16_loss)
        lines.at_most("fp8: mean loss of the last ten against bf16", off, LAST_TEN["cuda"])


def resume(place: Place, lines: Lines) -> None:
    """A run that is killed by SIGKILL goes on from its checkpoint as if nothing had happened."""
    steps = 40
    flags = [*data_flags(place, 300), "--depth", "2", "--max-seq-len", "32", "--device-batch-size", "8"]
    flags += ["--total-batch-size", "256", "--num-iterations", str(steps), "--no-compile", "--deterministic"]
    flags += ["--eval-every", "-1", "--save-every", "5", "--eval-tokens", "512"]
    whole = base_train_command(["--run", "whole", *flags])
    killed = base_train_command(["--run", "killed", *flags])
    saved = place.folder / "runs" / "killed" / "checkpoints" / "step_10"

    def far_enough():
        return saved.exists() and len(losses(place, "killed")) > 12

    [code], output = run_to_end(place, whole)
    lines.check("a run that nobody kills", code == 0, f"exit code {code}")
    print(output)
    [code], output = run_to_end(place, killed, kill_when=far_enough)
    made = len(losses(place, "killed"))
    ended = code == -signal.SIGKILL and made < steps
    lines.check("killed after a checkpoint", ended, f"exit code {code}, {made} steps made")
    print(output)
    [code], output = run_to_end(place, killed)
    print(output)
    resumed = [line for line in output.splitlines() if line.startswith("resuming run killed at step")]
    found = resumed[0] if resumed else "it started over"
    lines.check("the same command carries on", code == 0 and bool(resumed), found)
    ours, theirs = losses(place, "killed"), losses(place, "whole")
    if len(ours) != len(theirs):
        lines.check("it makes every step once", False, f"{len(ours)} of {len(theirs)} steps")
        return
    difference = largest(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    lines.at_most("losses against the run that was not killed, bit for bit", difference, 0)


def out_of_memory(place: Place, lines: Lines) -> None:
    """A batch that no memory holds is answered by one line and exit code 2."""
    config = GPTConfig.from_depth(12, vocab_size=1024, seq_len=2048)
    _, memory = torch.cuda.mem_get_info()
    rows = 1
    while planned_bytes(config, rows) < 3 * memory:
        rows *= 2
    flags = [*data_flags(place, 1024), "--run", "large", "--depth", "12", "--max-seq-len", "2048"]
    flags += ["--device-batch-size", str(rows), "--total-batch-size", str(rows * 2048)]
    flags += ["--num-iterations", "1", "--no-compile"]
    [code], output = run_to_end(place, base_train_command(flags))
    print(output)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    one_line = code == 2 and len(errors) == 1 and "Traceback" not in output
    said = errors[0][:200] if errors else "no line that starts with error:"
    lines.check(f"{rows} rows of 2,048 tokens", one_line, f"exit code {code}, {said}", "2, one line")
