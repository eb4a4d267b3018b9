"""The long version of tests/test_resume.py: bash tests/soak.sh [kills], or --minutes 10: see tests/abuse.py

20 SIGKILLs, half of them while a checkpoint is being written; world sizes 1 -> 2 -> 4 -> 3 -> 1; a file
system that is full, then read-only; the cost of a save. Prints what it found and exits with 1 where something
is not as it should be.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from nanomuon import checkpoint
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.optim import MuonAdamW
from nanomuon.param_groups import build_param_groups
from tests.abuse import abuse
from tests.training import Ranks, losses, rows, wait_until, write_corpus

LONG = ("--eval-every", "50", "--save-every", "3")
WORLDS = ("--total-batch-size", "384", "--device-batch-size", "1", "--eval-every", "25", "--save-every", "20")


def killed(base, kills):
    """Kill a run of 300 steps `kills` times; (kills while writing, bytes of rows and state that differ)."""
    reference = Ranks(base, "whole", 300, *LONG)
    assert reference.join(600) == [0], reference.output()
    generator, done, writing = random.Random(0), 0, 0
    folder = base / "runs" / "killed" / "checkpoints"
    while done < kills:
        # on past a few checkpoints, but never so far that the run ends before its last kill
        far = max(checkpoint.saved_steps(folder.parent), default=0) + generator.randint(4, 11)
        ranks = Ranks(base, "killed", 300, *LONG)
        wait_until(lambda far=far: len(losses(base, "killed")) >= far, ranks.alive)
        if done % 2:
            wait_until(lambda: list(folder.glob(".step_*")), ranks.alive)
        else:
            time.sleep(generator.uniform(0, 0.02))
        ranks.kill(signal.SIGKILL)
        assert ranks.join() == [-signal.SIGKILL]
        done, writing = done + 1, writing + bool(list(folder.glob(".step_*")))
        steps = [row["step"] for row in rows(base, "killed") if "train_loss" in row]
        assert steps == list(range(1, len(steps) + 1))
    last = Ranks(base, "killed", 300, *LONG)
    assert last.join(600) == [0], last.output()
    lost = sum(ours != theirs for ours, theirs in zip(rows(base, "killed"), rows(base, "whole"), strict=True))
    last = "checkpoints/step_300/rank_0.safetensors"
    ours, theirs = (load_file(base / "runs" / run / last) for run in ("killed", "whole"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        lost += int(
            (ours[name].reshape(-1).view(torch.uint8) != theirs[name].reshape(-1).view(torch.uint8)).sum()
        )
    return writing, lost


def moved(base):
    """Largest difference of a loss of 100 steps at world sizes 1 -> 2 -> 4 -> 3 -> 1 from those of one
    process.
    """
    reference = Ranks(base, "one", 100, *WORLDS)
    assert reference.join(600) == [0], reference.output()
    for world, end in zip((1, 2, 4, 3, 1), (20, 40, 60, 80, 100), strict=True):
        ranks = Ranks(base, "moved", 100, *WORLDS, processes=world)
        if end < 100:
            wait_until(
                lambda end=end: end in checkpoint.saved_steps(base / "runs" / "moved"), ranks.alive, 300
            )
            ranks.kill(signal.SIGKILL)
        codes = ranks.join(600)
        assert codes == [0 if end == 100 else -signal.SIGKILL] * world, ranks.output()
    one, other = losses(base, "one"), losses(base, "moved")
    assert len(one) == len(other) == 100
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def full(folder):
    """Train on a file system that fills up, make room, make it read-only. None where mounting is not
    permitted.
    """
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder]).returncode:
        return None
    try:
        write_corpus(folder / "texts")
        filler = folder / "filler"
        first = Ranks(folder, "full", 40, "--save-every", "10", "--keep-last", "1")
        wait_until(lambda: checkpoint.saved_steps(folder / "runs" / "full"), first.alive)
        os.kill(first.processes[0].pid, signal.SIGSTOP)
        space = os.statvfs(folder)
        filler.write_bytes(bytes(space.f_bavail * space.f_frsize - 1_000_000))
        os.kill(first.processes[0].pid, signal.SIGCONT)
        code, kept = first.join(), checkpoint.find(folder / "runs" / "full")
        filler.unlink()
        assert code == [2] and "No space left on device" in first.output(), first.output()
        again = Ranks(folder, "full", 40, "--save-every", "10", "--keep-last", "1")
        assert kept and again.join() == [0], again.output()
        assert [row["step"] for row in rows(folder, "full")] == [*range(1, 41), 40]
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        environment = {**os.environ, "NANOMUON_BASE_DIR": str(folder)}
        command = [
            sys.executable,
            "-m",
            "scripts.base_train",
            "--run",
            "other",
            "--corpus",
            f"path:{folder}/texts",
        ]
        refused = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert refused.returncode == 2 and "Read-only file system" in refused.stderr, refused.stderr
        return f"stopped with exit code {code[0]}, {kept.name} kept, finished with room; read-only refused"
    finally:
        subprocess.run(["umount", "-l", folder])


def cost(folder, background):
    """Milliseconds that a save of a depth-8 model keeps training waiting: median of 5."""
    torch.manual_seed(0)
    model = GPT(GPTConfig.from_depth(8, 8192, 256))
    model.init_weights(0)
    optimizer = MuonAdamW(
        build_param_groups(
            model,
            muon=dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.0),
            adamw=dict(lr=1e-3, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0),
        )
    )
    checkpoints, times = checkpoint.Checkpointer(folder, background=background), []
    for step in range(5):
        began = time.perf_counter()
        checkpoints.save(step, model, optimizer, {})
        times.append(1000 * (time.perf_counter() - began))
        checkpoints.wait()
    size = sum(file.stat().st_size for file in (folder / "checkpoints" / "step_4").iterdir())
    return statistics.median(times), size / 1e6


def main():
    parser = argparse.ArgumentParser(
        prog="bash tests/soak.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kills", type=int, nargs="?", default=20, help="SIGKILLs of a run (default: 20)")
    parser.add_argument("--minutes", type=float, help="instead: abuse runs at random for so long")
    parser.add_argument("--seed", type=int, default=0, help="of that (default: 0)")
    args = parser.parse_args()
    os.environ.update(NANOMUON_COMPILE="0", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        write_corpus(base / "texts")
        if args.minutes is not None:
            return abuse(base, args.minutes, args.seed)
        for background in (False, True):
            milliseconds, megabytes = cost(base / f"cost-{background}", background)
            kind = "background" if background else "blocking"
            print(f"save of {megabytes:.0f} MB, {kind}: {milliseconds:.0f} ms", flush=True)
        (base / "disk").mkdir()
        print(f"full disk: {full(base / 'disk') or 'not tried, mounting needs rights'}", flush=True)
        difference = moved(base)
        print(
            f"world sizes 1 -> 2 -> 4 -> 3 -> 1, largest difference in 100 losses: {difference:.1e}",
            flush=True,
        )
        writing, lost = killed(base, args.kills)
        print(f"kills survived: {args.kills}, {writing} of them during a save")
        print(f"bytes and rows that differ: {lost}")
    return difference > 1e-4 or lost > 0


if __name__ == "__main__":
    sys.exit(main())
