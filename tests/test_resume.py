"""Runs survive kills, stops, other world sizes, full disks, and losses that are not finite."""

import os
import random
import shutil
import signal
import time
from hashlib import sha256
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from nanomuon import checkpoint, dataloader, recipe, runtime, shards
from nanomuon.command import STOPPED
from nanomuon.corpus import open_corpus
from nanomuon.runtime import read_json, write_json
from nanomuon.settings import LENGTH, MAY_CHANGE, NOT_RECORDED
from scripts import base_train, data_prep, sample
from tests.mistakes import refused
from tests.training import (
    QUIET,
    Ranks,
    arguments,
    launch,
    losses,
    optimizer_file,
    rows,
    train,
    train_on,
    wait_until,
    write_corpus,
)

pytestmark = pytest.mark.usefixtures("environment")

OPTIONS = ("--depth", "1", "--eval-every", "25", "--save-every", "4")


@pytest.fixture(scope="module")
def whole(base):
    """Runs of 60 steps without interruption, by number of processes."""
    for processes in (1, 2):
        train_on(processes, base, f"whole-{processes}", 60, *OPTIONS)
    return {processes: base / "runs" / f"whole-{processes}" for processes in (1, 2)}


def tensors(run):
    """The tensors of the model and of the last checkpoint."""
    files = [run / "model.safetensors", *checkpoint.find(run).glob("*.safetensors")]
    return {(file.name, name): tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_run(ours, theirs):
    """Bitwise equal: every row in order, parameters and state, the exported model."""
    assert rows(ours.parent.parent, ours.name) == rows(theirs.parent.parent, theirs.name)
    torch.testing.assert_close(tensors(ours), tensors(theirs), rtol=0, atol=0)


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_at_random_moments_a_run_ends_as_if_nothing_had_happened(base, whole, processes):
    """It also survives damage to its newest checkpoint."""
    run, generator = f"killed-{processes}", random.Random(processes)
    run_dir, command = base / "runs" / run, (base, run, 60, *OPTIONS)
    for _ in range(2):
        saved = max(checkpoint.saved_steps(run_dir), default=0)
        ranks = Ranks(*command, processes=processes)
        ranks.wait_for_steps(saved + generator.randint(6, 12))
        time.sleep(generator.uniform(0, 0.03))
        ranks.kill(signal.SIGKILL)
        assert ranks.join() == [-signal.SIGKILL] * processes
        assert max(checkpoint.saved_steps(run_dir)) > saved
    # There are three if the last kill came before the oldest was removed
    *_, previous, newest = checkpoint.saved_steps(run_dir)
    file = max((run_dir / "checkpoints" / f"step_{newest}").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    half = run_dir / ".model.safetensors.1.tmp"
    half.touch()
    output = train_on(processes, *command)
    assert f"checkpoint step_{newest} is damaged and not used: {file} " in output and not half.exists()
    assert f"resuming run {run} at step {previous} of 60\n" in output
    assert_same_run(run_dir, whole[processes])


def test_one_process_becomes_two_and_two_become_three(base):
    small = "--depth 2 --max-seq-len 32 --total-batch-size 192 --vocab-size 300 --eval-tokens 512".split()
    # In 60 steps, rounding alone makes two worlds differ by 2e-3 at full rates, by 7e-6 at a tenth of them
    rates = "--matrix-lr 0.002 --embedding-lr 0.03 --unembedding-lr 0.0004 --scalar-lr 0.001".split()
    options = ("--dtype", "float32", *rates, *QUIET)
    for run, processes, until in (("as-one", 1, 30), ("grown", 1, 10), ("grown", 2, 20), ("grown", 3, 30)):
        shard = "fsdp" if processes == 3 else "none"
        ranks = Ranks(base, run, 30, *options, "--shard", shard, processes=processes, small=small)
        if until < 30:
            ranks.wait_for_steps(until)
            ranks.kill(signal.SIGINT)  # as Ctrl-C does to all of them
        assert ranks.join() == [STOPPED if until == 10 else 0] * processes, ranks.output()
        assert f"{ {1: 2, 2: 1, 3: 2}[processes] } rows x" in ranks.output()  # of 6, chosen in each world
        assert ("divided the model otherwise" in ranks.output()) == (shard == "fsdp")
    assert losses(base, "grown") == pytest.approx(losses(base, "as-one"), abs=5e-5)


def test_torchrun_passes_sigterm_on_and_the_run_saves(base):
    process, run_dir = launch(base, "torchrun", 60, *OPTIONS, processes=2), base / "runs" / "torchrun"
    wait_until(lambda: len(losses(base, "torchrun")) > 5, lambda: process.poll() is None)
    process.terminate()
    output, _ = process.communicate(timeout=30)
    step = len(losses(base, "torchrun"))
    line = f"stopped at step {step} and saved; the same command resumes it\n"
    assert step < 60 and line in output and (run_dir / "stopped").read_text() == line
    assert output.count("stopping after this step; another Ctrl-C ends it at once, without saving\n") == 1
    assert checkpoint.saved_steps(run_dir)[-1] == step


def into_a_pipe(flags):
    """base_train, whose output goes into the named pipe in the base folder."""
    pipe = os.open(f"{os.environ['NANOMUON_BASE_DIR']}/pipe", os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(pipe, descriptor)
    return base_train.main(flags)


def test_a_run_whose_terminal_is_gone_saves_all_the_same(base):
    """Or the reader of its pipe, after Ctrl-C with `| tee`."""
    os.mkfifo(base / "pipe")
    ranks = Ranks(base, "closed", 100_000, *QUIET, main=into_a_pipe)
    with open(base / "pipe"):
        ranks.wait_for_steps(3)
    ranks.kill(signal.SIGHUP)
    assert ranks.join(60) == [STOPPED]
    assert checkpoint.saved_steps(base / "runs" / "closed") == [len(losses(base, "closed"))]
    assert (base / "runs" / "closed" / "stopped").exists()


def test_a_signal_to_one_rank_in_the_last_step_stops_all(base, tmp_path):
    """It comes after the ranks have agreed on this step; one rank must not leave the others alone."""
    last_step = """
    import os, signal
    class Signalled(torch.optim.SGD):
        def step(self):
            super().step()
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 3 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
    return Signalled(model.parameters(), lr=0.1)
    """
    flags = optimizer_file(tmp_path, "signalled", last_step)
    output = train_on(2, base, "last-step", 3, *QUIET, *flags)
    assert "stopped before its last evaluation; the same command resumes it" in output
    assert checkpoint.saved_steps(base / "runs" / "last-step") == [3]
    assert (base / "runs" / "last-step" / "stopped").exists()


@pytest.mark.parametrize("processes, flags", [(1, ("--resume", "never")), (2, ())])
def test_a_signal_during_the_start_ends_it_with_a_line(base, processes, flags):
    """It is waiting for data that another process prepares, so --resume has not taken effect."""
    run, size = f"starting-{processes}", 256 + 10 * processes
    with runtime.locked(shards.shard_folder(open_corpus(f"path:{base}/texts"), size)):
        ranks = Ranks(base, run, 5, "--vocab-size", str(size), *QUIET, *flags, processes=processes)
        ranks.wait_for("waiting for it")
        ranks.kill(signal.SIGTERM)
        codes = ranks.join(20)
    assert codes == ([STOPPED] if processes == 1 else [0, 0]), ranks.output()
    line = "stopped with nothing to save; the same command resumes it\n"
    assert ranks.output().count(line) == 1 and ranks.output().endswith(line)
    assert (base / "runs" / run / "stopped").read_text() == line


SLEEPER = """
    class Sleeper(torch.optim.SGD):
        awake = {awake}
        def eval(self):
            print("asleep", flush=True)
            minute = __import__("datetime").timedelta(minutes=1)
            torch.distributed.HashStore().wait(["never"], minute)  # meanwhile no handler of Python's runs
        def step(self):
            if not self.awake:
                self.eval()
            self.awake -= 1
    return Sleeper(model.parameters(), lr=0.1)
"""


def asleep(base, awake, *flags):
    """A run of five steps that sleeps in the step after `awake` steps, or in its last evaluation."""
    file = optimizer_file(base, f"sleeper{awake}", SLEEPER.format(awake=awake))
    ranks = Ranks(base, f"sleeper{awake}", 5, *file, *QUIET, *flags)
    ranks.wait_for("asleep")
    return ranks


@pytest.mark.parametrize(
    "awake, flags, line, saved",
    [
        (0, ["--resume=never"], "with nothing to save; the same command without --resume resumes it\n", []),
        (5, [], "in its last evaluation; the same command resumes it\n", [5]),
    ],
)
def test_a_signal_in_the_first_step_or_the_last_evaluation_ends_a_run_at_once(
    base, awake, flags, line, saved
):
    """The first step may compile; before the last evaluation there is a checkpoint."""
    ranks = asleep(base, awake, *flags)
    ranks.kill(signal.SIGINT)
    assert ranks.join(5) == [STOPPED] and ranks.output().endswith(f"stopped {line}")
    assert checkpoint.saved_steps(base / "runs" / f"sleeper{awake}") == saved


def test_a_second_sigint_stops_at_once(base):
    ranks = asleep(base, awake=1)
    ranks.kill(signal.SIGINT)
    time.sleep(0.2)
    assert ranks.alive()
    ranks.kill(signal.SIGINT)
    assert ranks.join(5) == [130]


POISON = """
    import torch.distributed as dist
    from nanomuon.optim import DistMuonAdamW
    from nanomuon.optim_groups import build_param_groups
    forward, losses, backwards = model.forward, [], []
    def poisoned(*inputs, **options):
        loss = forward(*inputs, **options)
        losses.append(loss + float("nan") if len(losses) == 4 and dist.get_rank() == 1 else loss)
        return losses[-1]
    def poison(gradient):
        backwards.append(gradient)
        return gradient * float("nan") if len(backwards) == 7 and dist.get_rank() == 1 else gradient
    model.forward = poisoned
    model.lm_head.weight.register_hook(poison)
    return """
MUON = """DistMuonAdamW(build_param_groups(
        model, muon=dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.0),
        adamw=dict(lr=1e-3, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)))"""


@pytest.mark.parametrize("name,build", [("muon", MUON), ("adamw", "torch.optim.AdamW(model.parameters())")])
def test_nan_on_one_rank_skips_the_step_on_all(base, name, build):
    """First a loss whose gradients are finite, then a gradient; a step has one micro-step."""
    run, file = f"poison-{name}", optimizer_file(base, f"poison-{name}", POISON + build)
    output = train_on(2, base, run, 8, *file, "--eval-every=-1", "--save-every=1", "--keep-last=20")
    assert [row["skipped_steps"] for row in rows(base, run)[:-1]] == [0] * 4 + [1] * 2 + [2] * 2
    assert [step for step, loss in enumerate(losses(base, run)) if loss is None][0] == 4
    assert output.count("a gradient is not finite (1 in a row)") == 2
    # Steps without an update change nothing and are not saved
    assert checkpoint.saved_steps(base / "runs" / run) == [1, 2, 3, 4, 6, 8]
    for part in (base / "runs" / run / "checkpoints" / "step_8").glob("*.safetensors"):
        assert all(value.isfinite().all() for value in load_file(part).values())


NOISY = """
    class Noisy(torch.optim.Optimizer):
        def step(self):
            group = self.param_groups[0]
            group["k"] += 1
            assert any(param.grad.any() for param in group["params"]), "only training takes steps"
            for param in group["params"]:
                state = self.state[param]
                state["count"] = count = state.get("count", 0) + 1
                if count == 2:
                    state["second"], state["norm"] = param.grad.clone(), param.grad.norm()[None]
                if count > 2:
                    param.grad.add_(state["second"] / state["norm"])
                    state.pop("early", None)
                else:
                    state["early"] = param.grad.clone()
                state.setdefault("half", torch.zeros_like(param, dtype=torch.bfloat16)).lerp_(
                    param.grad.bfloat16(), 0.1
                )
                state.setdefault("steps", torch.tensor(0)).add_(1)
                assert state.get("phase", "early") == ("early" if count < 4 else "late")
                state["phase"] = "early" if count < 3 else "late"
                assert state["steps"].dtype == torch.int64
                param.grad.add_(state["half"])
                param.data.sub_(1e-3 / group["k"] / count * (param.grad + torch.randn_like(param)))
    return Noisy(model.parameters(), dict(rate=1e-3, k=0))
def schedule(group, step, steps):
    return {}
"""


def test_an_optimizer_that_draws_numbers_and_counts_in_its_group_resumes_to_the_same_bits(base):
    """It also counts in its state, creates some of it in step 2 and drops some in step 3. It has no rate."""
    file = optimizer_file(base, "noisy", NOISY)
    for run, steps in (("noisy", 6), ("noisy-twice", 3), ("noisy-twice", 6)):
        train(base, run, steps, *file, *QUIET)
    assert losses(base, "noisy") == losses(base, "noisy-twice")
    assert {row["lr_multiplier"] for row in rows(base, "noisy")[:-1]} == {None}


def test_a_recipe_that_has_changed_since_the_last_launch_is_reported(base, monkeypatch, capsys):
    train(base, "changed", 8, *OPTIONS)
    train(base, "changed", 8, *OPTIONS, "--resume", "step_4")
    out = capsys.readouterr().out
    assert "the recipe has changed" not in out
    assert "removing checkpoints of steps that this run repeats: 8\n" in out
    (before,) = {line for line in out.splitlines() if "from lm_head.weight" in line}
    monkeypatch.setattr(recipe, "adamw_lr_scale", lambda width: 1.0)
    train(base, "changed", 8, *OPTIONS, "--resume", "step_4")
    out = capsys.readouterr().out
    assert "warning: the recipe has changed since the last launch" in out and before in out


def test_training_goes_on_if_a_save_finds_no_room(base, monkeypatch, capsys):
    write = checkpoint.save

    def save_or_not(run_dir, step, *rest):
        if step in (16, 20):
            raise checkpoint.NotWritten(f"step_{step} was not written")
        write(run_dir, step, *rest)

    monkeypatch.setattr(checkpoint, "save", save_or_not)
    run_dir = base / "runs" / "full"
    with refused("step_20 was not written"):
        train(base, "full", 20, *OPTIONS)
    assert "warning: step_16 was not written" in capsys.readouterr().out
    assert len(losses(base, "full")) == 20 and not (run_dir / "summary.json").exists()
    assert checkpoint.saved_steps(run_dir) == [8, 12]


UNFIT = """
    class Unfit(torch.optim.SGD):
        def step(self):
            super().step()
            counter = torch.zeros(2)
            for param in self.param_groups[0]["params"]:
                {}
    return Unfit(model.parameters(), lr=0.1)
"""


MORE = """
    class More(torch.optim.SGD):
        def state_dict(self):
            return {**super().state_dict(), "more": 1}
    return More(model.parameters(), lr=0.1)
"""


@pytest.mark.parametrize(
    "name, build, said",
    [
        (
            "list",
            UNFIT.format("self.state[param]['a'] = [1]"),
            "0.a is a list, which a checkpoint cannot store",
        ),
        (
            "shared",
            UNFIT.format("self.state[param]['n'] = counter[1:]"),
            "1.n shares memory with optimizer.0.n",
        ),
        ("global", UNFIT.format("self.state['all'] = counter"), "has 'all', which is not a parameter"),
        ("number", UNFIT.format("self.state[param][0] = 1"), "stores state by names that are strings"),
        ("more", MORE, "has state, param_groups, more; a checkpoint stores state and param_groups"),
    ],
)
def test_state_that_no_checkpoint_can_store_ends_a_run_after_its_first_step(base, name, build, said):
    file = optimizer_file(base, name, build)
    with refused(said):
        train(base, name, 20, *OPTIONS, *file)
    assert losses(base, name) == []


@pytest.mark.parametrize("signalled", [False, True])
def test_a_run_saves_when_its_shards_end(base, monkeypatch, capsys, handlers, signalled):
    """They end within a step; the run resumes at the beginning of that step. It has read its validation set
    at its start.
    """
    few_steps = ["--depth=1", "--total-batch-size=8192", "--device-batch-size=64", "--save-every=-1"]
    few_steps += ["--eval-every=2"]
    train(base, "all-shards", 8, *few_steps)
    run_dir, command = (
        base / "runs" / f"ends-{signalled}",
        arguments(base, f"ends-{signalled}", 8, *few_steps),
    )
    with monkeypatch.context() as patched:
        read = mock.Mock(wraps=dataloader.read_shards)
        patched.setattr(dataloader, "read_shards", read)
        patched.setattr(shards.Manifest, "has_window", lambda manifest, window: window == 0)
        patched.setattr(shards, "PATIENCE", -1)
        if signalled:  # while data_prep is writing
            patched.setattr(shards, "being_written", lambda _: signal.raise_signal(signal.SIGTERM) or True)
            assert base_train.main(command) == STOPPED
        else:
            with refused("no process is writing it: run python -m scripts.data_prep"):
                base_train.main(command)
        assert [call.args[2] for call in read.call_args_list] == ["val", "train"]
    (saved,) = checkpoint.saved_steps(run_dir)
    assert 0 < saved < 8
    line = (run_dir / "stopped").read_text() if signalled else capsys.readouterr().out
    assert f"stopped at step {saved} and saved" in line
    assert base_train.main(["--run", run_dir.name]) == 0 and not (run_dir / "stopped").exists()
    assert_same_run(run_dir, base / "runs" / "all-shards")


def test_a_launch_that_another_one_has_overtaken_is_refused(base, monkeypatch):
    """It read the run's settings before it held the lock, and would continue with its own flags."""
    make_plan, command = base_train.make_plan, arguments(base, "overtaken", 2, *QUIET)

    def slow_plan(*inputs):
        monkeypatch.setattr(base_train, "make_plan", make_plan)
        assert base_train.main([*command, "--seed", "2"]) == 0
        (base / "runs/overtaken/summary.json").unlink()  # it was stopped, and is not complete
        return make_plan(*inputs)

    monkeypatch.setattr(base_train, "make_plan", slow_plan)
    with refused("another launch changed run overtaken in the meantime"):
        base_train.main(command)


def not_permitted(folder, ignore_errors=False):
    """shutil.rmtree() of a folder that this user cannot delete."""
    if not ignore_errors:
        raise PermissionError(f"no permission to delete {folder}")


def test_a_run_keeps_its_options_and_takes_another_length(base, capsys):
    folder = base / "runs" / "options"
    train(base, "options", 10, "--matrix-lr", "0.01", *QUIET)
    for flags, said, far in (
        ("--num-iterations 6", "run options is complete", 10),
        ("--num-iterations 20", "at step 10 of 20\nlength     20 steps, 10 before: ", 20),
        ("--resume step_10", "resuming run options at step 10 of 20\n", 20),  # although complete
        ("--target-param-data-ratio 0.006", "run options is complete", 20),  # fewer steps
        ("--plan", f"{folder} exists, its newest checkpoint is of step 20\n", 20),
    ):
        capsys.readouterr()
        assert base_train.main(["--run", "options", *flags.split()]) == 0
        output = capsys.readouterr().out
        assert said in output and ("\nval_bpb: " in output) == (flags != "--plan")
        assert len(losses(base, "options")) == far
    with refused("run options has done 10 steps, and this command wants 6: give a larger --num-iterations"):
        base_train.main("--run options --resume step_10 --num-iterations 6".split())
    assert rows(base, "options")[11]["lr_multiplier"] == 0.5  # step 11 of 20, not the end of 10
    recorded = read_json(folder / "settings.json")["options"]
    assert recorded["matrix_lr"] == 0.01 and recorded["num_iterations"] == 20


def test_a_run_that_cannot_go_on_or_start_over_keeps_what_it_has(base, monkeypatch, capsys):
    """Its folder may be a link, as to a larger disk."""
    folder, longer = base / "runs" / "kept", "--run kept --num-iterations 5".split()
    train(base, "kept", 2, *QUIET)
    recorded, metrics = (folder / "settings.json").read_bytes(), folder / "metrics.jsonl"
    sound = metrics.read_bytes()
    metrics.write_bytes(b"?\n" + sound)
    with refused("line 1 cannot be read"):
        base_train.main(longer)
    assert (folder / "summary.json").exists()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", not_permitted)
        with pytest.raises(PermissionError):
            train(base, "kept", 3, "--resume", "never", *QUIET)
    assert (folder / "settings.json").read_bytes() == recorded
    metrics.write_bytes(sound)
    shutil.rmtree(folder / "checkpoints")
    with refused("is complete and has no checkpoint to resume from"):
        base_train.main(longer)
    folder.rename(base / "elsewhere")
    folder.symlink_to(base / "elsewhere")
    (folder / "core.json").touch()
    train(base, "kept", 3, "--resume", "never", "--seed", "1", *QUIET)
    assert "starting over: deleting everything in the folder of run" in capsys.readouterr().out
    assert len(losses(base, "kept")) == 3 and not (folder / "core.json").exists()


def test_a_run_keeps_the_windows_that_it_began_with(base, installed):
    """Whatever is installed on the machine that resumes it."""
    installed("FA4")
    torch.nn.attention.activate_flash_attention_impl("FA4")
    train(base, "windows", 2, *QUIET)
    torch.nn.attention.restore_flash_attention_impl()
    assert base_train.main(["--run", "windows", "--num-iterations", "3"]) == 0
    assert read_json(base / "runs" / "windows" / "config.json")["window_pattern"] == "SSSL"


def test_settings_that_define_a_run_cannot_change(base, monkeypatch, tmp_path):
    """Even if the run is complete, and before other texts are prepared."""
    write_corpus(tmp_path / "texts")
    monkeypatch.chdir(tmp_path)
    train(base, "defined", 2, *QUIET, "--corpus", "path:texts")
    monkeypatch.chdir(base)  # the run has recorded the absolute path
    settings = base / "runs" / "defined" / "settings.json"
    before, prepared = settings.read_bytes(), os.listdir(base / "shards")
    changes = "--dtype bfloat16 --total-batch-size 512 --depth 3".split()
    said = "--depth 2, not 3.*--total-batch-size 256, not 512.*--dtype float32, not bfloat16.*--resume never$"
    with refused(said):
        base_train.main(["--run", "defined", *changes])
    (tmp_path / "texts" / "more.txt").write_text("lorem ipsum " * 200)
    for main, words in (base_train.main, []), (data_prep.main, ["--"]):
        with refused("run defined was trained on path:.*, and path:.* now has other texts"):
            main([*words, "--run", "defined"])
    assert settings.read_bytes() == before and len(losses(base, "defined")) == 2
    assert os.listdir(base / "shards") == prepared


def test_runs_of_the_version_that_had_experts_and_fp8(base, capsys):
    """That version's settings.json and config.json, first without experts and fp8, then with each. It
    recorded the texts' names and times.
    """
    folder, before = base / "runs" / "older", Path(__file__).parent / "before_phases"
    train(base, "older", 4, *QUIET)
    settings, config = read_json(before / "settings.json"), read_json(before / "config.json")
    settings["options"]["corpus"] = f"path:{base}/texts"
    trained_on = read_json(folder / "settings.json")["trained_on"]
    settings["trained_on"] = {**trained_on, "revision": settings["trained_on"]["revision"]}

    def use(**changed):
        options = {**settings["options"], **changed}
        write_json(folder / "settings.json", {**settings, "options": options})
        write_json(folder / "config.json", {**config, **changed})

    use()
    assert base_train.main(["--run", "older", "--num-iterations", "6"]) == 0
    assert len(losses(base, "older")) == 6
    assert "the run recorded only names and times: texts cannot be compared\n" in capsys.readouterr().out
    for changed, command, said in (
        (dict(experts=2), sample, "this version has no models with experts"),
        (dict(experts=2), base_train, "options: experts is not a flag of this version: use the version that"),
        (dict(fp8=True), base_train, "options: fp8 is not a flag of this version: .* or start over: --res"),
    ):
        use(**changed)
        with refused(said):
            command.main(["--run", "older"])
    sample.main(["--run", "older", "--max-tokens", "1"])  # its model is an ordinary one


RAN = """
    with open(__file__ + ".ran", "a") as ran:
        ran.write("x")
    return torch.optim.SGD(model.parameters(), lr=RATE)
"""


def test_an_optimizer_file_runs_only_when_it_is_named(base, tmp_path, capsys):
    """settings.json cannot name one to run: the folder may come from somebody else."""
    flag, file = optimizer_file(tmp_path, "mine", RAN.replace("RATE", "0.1"))
    ran = tmp_path / "mine.py.ran"
    text = (tmp_path / "mine.py").read_text()
    digest = sha256(text.encode()).hexdigest()

    train(base, "filed", 2, flag, file, *QUIET)
    assert f"running {file}, SHA-256 {digest}\n" in capsys.readouterr().out
    with refused(f"{file} of SHA-256 {digest}, not none: give the same values again"):
        train(base, "filed", 4, *QUIET)
    (tmp_path / "mine.py").write_text(text.replace("0.1", "0.2"))
    with refused(f"mine.py of SHA-256 {digest}, not .*: --resume never"):
        train(base, "filed", 4, flag, file, *QUIET)
    assert ran.read_text() == "x"
    (tmp_path / "moved.py").write_text(text)  # the text counts, not the name
    train(base, "filed", 4, flag, str(tmp_path / "moved.py"), *QUIET)


def test_only_these_flags_are_not_part_of_what_defines_a_run():
    changing = "corpus skip_unreadable no_compile eval_every eval_tokens save_every keep_last core_bundle"
    for scope, names in (
        (NOT_RECORDED, "run resume plan wandb optimizer_file shard tensor_parallel device_batch_size"),
        (LENGTH, "num_iterations target_flops target_param_data_ratio"),
        (MAY_CHANGE, f"{changing} core_every core_items"),
    ):
        scopes = base_train.make_parser().scopes
        assert {name for name in scopes if scopes[name] == scope} == set(names.split())
