"""A finished run: its model for others to load.

The model can also be that of a checkpoint, while the run goes on.
"""

from pathlib import Path

from nanomuon import checkpoint, export, shards
from nanomuon.corpus import open_corpus
from nanomuon.files import tensor_shapes
from nanomuon.gpt import GPT, GPTConfig
from nanomuon.parallel import build_model
from nanomuon.plan import meta_model
from nanomuon.run_folder import find_run, read_settings
from nanomuon.runtime import InputError, Runtime, base_dir, print0
from nanomuon.tokenizer import Tokenizer, load_or_restore


def load_run(run: str, runtime: Runtime, checkpoint_name: str | None = None) -> tuple[GPT, Tokenizer, dict]:
    """(model, tokenizer, facts) of a finished run, by its name or by the path of its folder (see find_run).

    checkpoint_name: "last" or "step_<n>" for the model as that checkpoint has it, whether the run has ended
    or not; called by all ranks then. InputError where there is none, or where model and tokenizer do not
    belong together. A tokenizer that is missing is restored if another folder on this machine has it.
    """
    run_dir = find_run(run)
    if checkpoint_name is not None:
        return load_run_at_checkpoint(run_dir, checkpoint_name, runtime)
    if not (run_dir / "model.safetensors").exists() and checkpoint.saved_steps(run_dir):
        raise InputError(
            f"{run_dir} holds no finished model yet: --checkpoint last takes that of its last checkpoint"
        )
    config, tokenizer, about = describe_run(run_dir, runtime.rank)
    model = build_model(config, runtime, seed=0)
    export.load_model_weights(run_dir, model)
    return model, tokenizer, about


def load_run_at_checkpoint(run_dir: Path, name: str, runtime: Runtime) -> tuple[GPT, Tokenizer, dict]:
    """load_run with the model of a checkpoint: "last", or "step_<n>"."""
    there = [f"step_{step}" for step in checkpoint.saved_steps(run_dir)]
    if not there or name not in ("last", *there):
        raise InputError(f"{run_dir} has no checkpoint {name}; it has {', '.join(there) or 'none'}")
    found = checkpoint.find(run_dir, "auto" if name == "last" else name)
    settings, file = read_settings(run_dir), run_dir / "settings.json"
    trained_on = settings.trained_on
    tokenizer = load_or_restore(run_dir / "tokenizer", trained_on["tokenizer"], runtime.rank)
    config = possible_config(file, settings.model)
    checkpoint.check_model_fits(found, meta_model(config))  # before its memory is asked for
    model = build_model(config, runtime, seed=0)
    step = checkpoint.load_model(found, model)
    about = {"step": step, "val_bpb": None, "corpus": trained_on["corpus"], "tokenizer": tokenizer.hash}
    about["revision"] = trained_on["revision"]
    return model, tokenizer, about


def describe_run(run_dir: Path, rank: int = 0) -> tuple[GPTConfig, Tokenizer, dict]:
    """(config, tokenizer, facts) of a finished run: load_run without its weights, with the same errors."""
    config, about = export.load_model_config(run_dir)
    tokenizer = load_or_restore(run_dir / "tokenizer", about["tokenizer"], rank)
    if tokenizer.hash != about["tokenizer"] or tokenizer.vocab_size != config["vocab_size"]:
        raise InputError(
            f"{run_dir}/tokenizer has {tokenizer.vocab_size} tokens and is not the one the model was trained "
            f"with ({config['vocab_size']} tokens); put that one back"
        )
    return model_config(run_dir, config), tokenizer, about


def validation_folder(corpus_name: str, tokenizer: Tokenizer, about: dict) -> Path:
    """Folder of shards with the validation set of a corpus in the tokens of a run; written where it is not.

    tokenizer, about: as load_run gives them. InputError where the documents are not on this machine and the
    shards are not either.
    """
    try:
        corpus = open_corpus(corpus_name)
    except InputError as error:
        wanted = about.get("revision") if corpus_name == about["corpus"] else None
        for manifest_file in sorted(base_dir().glob("shards/*/manifest.json")):
            folder = manifest_file.parent
            try:
                manifest = shards.read_manifest(folder)
            except InputError:  # of another corpus, as far as one can tell
                continue
            same = wanted is not None and manifest["revision"] == wanted
            if same and manifest["tokenizer"] == tokenizer.hash and manifest["val"]:
                print0(f"{error}; its validation set is in {folder}")
                return folder
        raise InputError(f"{error}; --corpus NAME evaluates on documents that are here") from error
    revision = about.get("revision")
    if corpus_name == about["corpus"] and revision not in (None, corpus.revision):
        print0(
            f"corpus {corpus_name} is not as it was when the run was trained (revision {corpus.revision}, "
            f"which was {revision}): the figure may be another one"
        )
    return shards.prepare(corpus, tokenizer=tokenizer, max_tokens=0)


def model_config(run_dir: Path, config: dict) -> GPTConfig:
    """What config.json says of the model, once the header of model.safetensors agrees.

    Before that nothing is built on its word: a few bytes could ask for more memory than there is. InputError
    where the two do not belong together.
    """
    file, weights = run_dir / "config.json", run_dir / "model.safetensors"
    shape = possible_config(file, config)
    there = tensor_shapes(weights)
    if shape.depth > len(there):  # even a model without memory takes its time to build
        raise InputError(f"{file}: config.depth is {shape.depth}, but {weights} has {len(there)} tensors")
    wanted = {name: tuple(tensor.shape) for name, tensor in meta_model(shape).state_dict().items()}
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            raise InputError(
                f"{weights} does not fit the model of config.json: {name} has shape {there.get(name)}, "
                f"but by the config {wanted.get(name)}"
            )
    return shape


def possible_config(file: Path, fields: dict) -> GPTConfig:
    """The GPTConfig of these fields, which `file` has; InputError where no model can have them together."""
    try:
        return GPTConfig(**fields)
    except ValueError as error:
        raise InputError(f"{file}: {error}") from error
