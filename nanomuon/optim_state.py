"""Where the state of an optimizer lives, and how it is saved and loaded.

Each work item of `optim.py` creates its state tensors, and a Place for each that says where it lives.
`SavedByName` saves and loads them. `full_state_dict` has whole tensors by name, so it loads into any world
and layout.
"""

import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, distribute_tensor

from nanomuon.optim_groups import (
    MUON_OPTIONS,
    as_numbers,
    check_choice,
    clean_name,
    default_names,
    fixed_options,
    named_parameters,
    option_name,
)

GONE = {"row_equilibrate", "renormalize"}  # options of earlier versions, off by default
FIXED_KEYS = {"kind", "ns_steps", *MUON_OPTIONS, *GONE}  # what a loaded group may not change


def local(tensor):
    """This rank's shard of a DTensor; any other tensor as is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(param):
    """Whether each rank has only a shard. A DTensor that is whole on every rank counts as replicated."""
    if not isinstance(param, DTensor):
        return False
    for axis, placement in enumerate(param.placements):
        if not placement.is_replicate() and param.device_mesh.size(axis) > 1:
            return True
    return False


def state_dtype(param):
    """float64 for a float64 parameter, float32 for any other."""
    return torch.promote_types(param.dtype, torch.float32)


class Place:
    """Where one state tensor lives.

    tensor: this rank's shard of it, or all of it; None if another rank owns it. shape: of the whole.
    mesh, placements: how the whole is cut as a DTensor, if it is. owner: the only rank of `world` that has
    it, or None; like: a tensor of its dtype and device. value: the tensor in optimizer.state, a DTensor if it
    is a shard; it shares memory with `tensor`.
    """

    def __init__(self, tensor, shape=None, mesh=None, placements=(), world=None, owner=None, like=None):
        self.tensor, self.value = tensor, tensor
        self.shape = tuple(tensor.shape if shape is None else shape)
        self.mesh, self.placements = mesh, tuple(placements)
        self.world, self.owner, self.like = world, owner, like
        if mesh is not None:
            if tensor.storage_offset():
                # New storage for the same memory: a DTensor with an offset into its bank cannot be copied or
                # pickled
                with torch.cuda.device_of(tensor):
                    tensor = torch.from_dlpack(tensor)
            size, stride = torch.Size(self.shape), torch.empty(self.shape, device="meta").stride()
            self.value = DTensor.from_local(
                tensor, mesh, self.placements, run_check=False, shape=size, stride=stride
            )

    def gathered(self):
        """A copy of the whole tensor, on every rank. Collective."""
        if self.tensor is None:
            value = self.like.new_empty(self.shape)
        else:
            value = whole(self.value).clone(memory_format=torch.contiguous_format)
        if self.owner is not None:
            value = self.world.broadcast(value, self.owner).wait()
        return value

    def shard_of(self, saved):
        """This rank's shard of a saved tensor, or all of it if this place is not cut. Collective if the saved
        tensor is a DTensor.
        """
        if self.mesh is None:
            return whole(saved)
        if isinstance(saved, DTensor) and saved.device_mesh == self.mesh:
            if saved.placements == self.placements:
                return saved.to_local()
        return distribute_tensor(whole(saved), self.mesh, self.placements, src_data_rank=None).to_local()


def place_like(param, tensor):
    """The place of a tensor that is cut like its parameter, or whole on every rank."""
    if is_sharded(param):
        return Place(tensor, param.shape, param.device_mesh, param.placements)
    return Place(tensor)


def place_of_rows(param, tensor, world):
    """The place of a tensor whose rows are divided among the ranks of a world by `World.span`."""
    if world.size == 1:
        return place_like(param, tensor)
    mesh = DeviceMesh.from_group(world.process_group, tensor.device.type)
    return Place(tensor, (len(param), *tensor.shape[1:]), mesh, [Shard(0)])


def take_over(state, param, places):
    """Put the tensors of these places into optimizer.state. State that is already there, as in a copied
    optimizer, is first copied into them. A parameter whose state other ranks own gets an empty entry.
    """
    earlier = dict(state[param])
    for key, place in places.items():
        if place.tensor is not None:
            if key in earlier:
                place.tensor.copy_(place.shard_of(earlier[key]))
            state[param][key] = place.value


def check_places(optimizer):
    """ValueError if optimizer.state no longer has the tensors of the places."""
    for name, param in named_parameters(optimizer.param_groups):
        entry = optimizer.state.get(param, {})
        for key, place in optimizer.places.get(param, {}).items():
            if entry.get(key) is not place.value:
                raise ValueError(
                    f"{key} of {name} was replaced or removed in optimizer.state: write into it in place"
                )


def refuse_own_entries(optimizer):
    """ValueError for entries that a user put into optimizer.state, which no other world could load."""
    for name, param in named_parameters(optimizer.param_groups):
        if own := optimizer.state.get(param, {}).keys() - optimizer.places.get(param, {}).keys():
            raise ValueError(
                f"optimizer.state has {', '.join(map(str, own))} of {name}, which would load into "
                "this world only: keep it elsewhere"
            )


@dataclass
class ToLoad:
    """What load_state_dict has found in saved state. Only state that this rank stores counts as missing."""

    found: list  # [(place, its saved tensor; None if it was saved before the first step)]
    missing: list  # [(name, key)]
    unknown: set  # names of parameters that no group has
    dropped: set  # keys of another kind's or direction's state
    numbers: list  # for each group, its new hyperparameters


class SavedByName:
    """Saving, loading and copying of an optimizer that has `places`, `plan()` and `reset_plan()`."""

    def state_dict(self):
        """This rank's state in torch's layout, {"state": {number: {key: tensor}}, "param_groups": [...]},
        without communication. Tensors share memory with the optimizer's, shards are DTensors, and functions
        among the options become names. ValueError on every rank if some state exists on only one of several
        ranks.
        """
        if self.state:  # after copy.deepcopy or pickle there is state before the plan
            # optimizer.state is saved even if it was replaced: Lightning moves it to the CPU
            self.plan(reads_state=False)
            refuse_own_entries(self)
        for name, param in named_parameters(self.param_groups):
            for key, place in self.places.get(param, {}).items():
                if place.owner is not None and place.world.size > 1:
                    raise ValueError(
                        f"only one of {place.world.size} ranks has {key} of {name}, so state_dict() would "
                        "lose it: save full_state_dict(), or named_state_dict() with "
                        "torch.distributed.checkpoint (under DistributedDataParallel use MuonAdamW)"
                    )
        saved = super().state_dict()
        for group in saved.get("param_groups", ()):  # copies; the user's hooks may have changed everything
            group.update(saved_group(group))
        if not self.state:
            # torch.distributed.checkpoint fills only what is here, so it would ignore the state in its file.
            # This key makes it raise an error, unless the file has the key too
            saved["before_first_step"] = True
        return saved

    def named_state_dict(self, whole=False):
        """state_dict() by name: {"state": {name: {key: tensor}}, "param_groups": groups without params}.
        Tensors share memory with the optimizer's. whole: copies of whole tensors on every rank; collective.
        """
        self.plan()
        refuse_own_entries(self)
        state = {}
        for name, param in named_parameters(self.param_groups):
            if whole and param in self.places:
                state[name] = {key: place.gathered() for key, place in self.places[param].items()}
            elif self.state.get(param):  # empty if other ranks own all of it
                state[name] = dict(self.state[param])
        return {"state": state, "param_groups": [saved_group(group) for group in self.param_groups]}

    def full_state_dict(self):
        """named_state_dict() with whole tensors on every rank, as copies. Collective."""
        return self.named_state_dict(whole=True)

    @torch.no_grad()
    def load_state_dict(self, state_dict, hyperparameters="restore", strict=True):
        """Restore whole state, a full_state_dict() or any state of one process, saved in any world and
        grouping; a named_state_dict() or state_dict() with shards that this rank saved in the same world; or
        one that torch.distributed.checkpoint has filled. Frozen parameters may be missing. Collective.

        hyperparameters: "restore" copies lr, the other numbers and whatever schedulers wrote from the groups
        in which these parameters were saved, as torch's optimizers do; "keep" keeps those of our groups.
        State keeps its dtype. ValueError on every rank, before anything changes, for the first difference: a
        missing name or key, another shape, a shard that another rank has saved, other options. A warning for
        state of parameters that no group has. strict=False: missing state is left unchanged; returns its
        [(name, key)].
        """
        to_load = self.world.raise_together(lambda: self.what_to_load(state_dict, hyperparameters, strict))
        if strict and to_load.unknown:
            warnings.warn(
                f"state of {len(to_load.unknown)} parameters, such as {min(to_load.unknown)}, is not loaded, "
                "because no group has them: to train them, call add_param_group first",
                stacklevel=3,  # 1 is here, 2 torch.no_grad
            )
        if to_load.dropped:
            keys = ", ".join(sorted(to_load.dropped))
            warnings.warn(f"{keys}: not loaded, as state of another kind or direction", stacklevel=3)
        zero = torch.zeros((), device="cpu")  # of state that was saved before the first step
        for place, saved in to_load.found:
            shard = zero if saved is None else place.shard_of(saved)
            if place.tensor is not None:
                place.tensor.copy_(shard)
        for group, numbers in zip(self.param_groups, to_load.numbers, strict=True):
            group.update(numbers)
        return None if strict else to_load.missing

    def what_to_load(self, state_dict, hyperparameters, strict):
        """What load_state_dict will copy. Raises ValueError as it does."""
        check_choice("hyperparameters", hyperparameters, ("restore", "keep"))
        check_form(state_dict.get("param_groups"), self.param_groups)
        groups, by_torch = named_groups(state_dict["param_groups"], self.param_groups)
        state = state_by_name(state_dict["state"], groups)
        if by_torch and not state:
            raise ValueError(
                "torch's utilities saved no state: gradients were left before the first step, so call "
                "zero_grad() before get_optimizer_state_dict()"
            )
        restored = [{} for _ in self.param_groups]
        if hyperparameters == "restore":
            restored = [restored_numbers(i, group, groups) for i, group in enumerate(self.param_groups)]
        found, missing, dropped = [], [], set()
        if state or self.state:  # after copy.deepcopy or pickle there is state before the plan
            self.plan()
        if strict and not state:  # saved before the first step
            found = [(place, None) for places in self.places.values() for place in places.values()]
        else:
            for name, param in named_parameters(self.param_groups):
                entry = state.get(name, {})
                # torch's utilities have already checked what is missing
                if not entry and (by_torch or not param.requires_grad):
                    continue
                places = self.places.get(param, {})
                for key, place in places.items():
                    if key in entry:
                        found.append((place, checked(entry[key], place, key, name)))
                    elif place.tensor is not None:
                        missing.append((name, key))
                dropped |= entry.keys() - places.keys()
        if strict and missing:
            name, key = missing[0]
            raise ValueError(f"the loaded state has no {key} of {name}: {why_missing(state.get(name), key)}")
        ours = {name for name, _ in named_parameters(self.param_groups)}
        return ToLoad(found, missing, state.keys() - ours, dropped, restored)

    def __getstate__(self):
        """For copy.deepcopy and pickle: omits the plan, which the copy makes again when it needs it."""
        kept = ("defaults", "param_groups", "state", "compile", "ns_dtype", "world", "skipped_steps")
        return {key: self.__dict__[key] for key in kept}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.reset_plan()


def saved_group(group):
    """A copy of a param group as it is saved, without parameters."""
    return {key: saved_value(key, value) for key, value in group.items() if key != "params"}


def saved_value(key, value):
    """A group's value as it is saved: a copy of a tensor or list; of a function that we call, its name."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list):
        return list(value)
    return option_name(value) if key in FIXED_KEYS else value


def check_form(saved, ours):
    """ValueError for groups of another optimizer, and for default names that may mean other parameters."""
    if not saved:
        raise ValueError("the loaded state has no param groups: MuonAdamW did not save it")
    for i, group in enumerate(saved):
        if "kind" not in group or "names" not in group:
            raise ValueError(
                f"group {i} of the loaded state has no kind or names: MuonAdamW did not save it, or torch's "
                "utilities matched it to other groups (full_state_dict() loads into any)"
            )
    theirs = [group["names"] for group in saved]
    for i, group in enumerate(ours):
        names = group["names"]
        if names and names == default_names(i, len(names)) and (i >= len(theirs) or theirs[i] != names):
            raise ValueError(
                "state without names loads only into the same groups: give every group names=[...]"
            )


def named_groups(saved, ours):
    """(the saved groups with `names` parallel to their `params`, whether torch's utilities made `params`).

    torch.distributed.checkpoint.state_dict puts the parameters' names in the whole model there. When it loads
    state, they are those of our groups, in our order, but `names` are still those that were saved: between
    the two, parameters may have been frozen, unfrozen or moved.
    """
    groups, by_torch = [], False
    for i, group in enumerate(saved):
        names = [clean_name(name) for name in group["names"]]
        in_model = [clean_name(name) for name in group.get("params", ()) if isinstance(name, str)]
        if in_model:
            by_torch = True
            names = matching_names(in_model, names, ours[i]["names"] if i < len(ours) else [])
        groups.append(group | {"names": names})
    return groups, by_torch


def matching_names(in_model, saved, ours):
    """The names, in an optimizer's group, of parameters with the names `in_model`: either those that the
    group was saved with, or those of our group. ValueError if they may mean other parameters.
    """
    if ours and set(ours) <= set(in_model):
        return in_model  # a tied parameter has several, and one of them in our group
    if are_ends(ours, in_model):
        return ours
    if are_ends(saved, in_model):
        return saved
    if saved == ours and len(ours) == len(in_model):  # names of the user's own, or none: the same group
        return ours
    raise ValueError(
        f"torch's utilities cannot match the names in our groups to those in the model, such as "
        f"{in_model[0]}, if parameters were frozen, unfrozen or moved: give the groups the model's names, or "
        "save full_state_dict()"
    )


def are_ends(names, in_model):
    """Whether each name is the end of the other in the same place: `0.weight` of `body.0.weight`."""
    if len(names) != len(in_model):
        return False
    return all(f".{full}".endswith(f".{name}") for name, full in zip(names, in_model, strict=True))


def state_by_name(state, groups):
    """{name: entry} from state by name, or by what the groups have in `params`."""
    names = {}
    for group in groups:
        if "params" in group:
            names |= dict(zip(group["params"], group["names"], strict=True))
    return {clean_name(names.get(key, key)): entry for key, entry in state.items()}


def checked(saved, place, key, name):
    """The saved tensor; ValueError if it does not fit the place."""
    if tuple(saved.shape) != place.shape:
        raise ValueError(f"{key} of {name} has shape {tuple(saved.shape)}, expected {place.shape}")
    if isinstance(saved, DTensor) and not is_of_this_rank(saved, place.mesh):
        raise ValueError(
            f"the loaded {key} of {name} is a shard that another rank or world has saved: save "
            "optimizer.full_state_dict() instead"
        )
    return saved


def why_missing(entry, key):
    """entry: the saved state of the parameter, or None."""
    if entry:
        why = f"it was trained with other options or the other kind, and has {', '.join(entry)}"
    else:
        why = "it was frozen or did not exist when this was saved, or another rank has it (full_state_dict())"
    return f"{why}; strict=False loads the rest"


def is_of_this_rank(saved, mesh):
    """Whether a DTensor's shard is this rank's, on this mesh. A DTensor read from a file has the coordinates
    of the rank that wrote it.
    """
    if mesh is None or not torch.equal(saved.device_mesh.mesh, mesh.mesh):
        return False
    here = (saved.device_mesh.mesh == dist.get_rank()).nonzero().flatten()
    return here.tolist() == list(saved.device_mesh.get_coordinate() or [])


def restored_numbers(i, group, saved):
    """The values that our i-th group takes from the saved groups of its parameters: all except options."""
    restored = {}
    ours, keep = set(group["names"]), 'load with hyperparameters="keep"'
    for source in saved:
        if ours.isdisjoint(source["names"]):
            continue
        theirs = fixed_options(source) | {key: True for key in GONE if source.get(key)}
        if theirs != fixed_options(group):
            raise ValueError(f"param group {i} was saved with {theirs}, not {fixed_options(group)}: {keep}")
        for key, value in source.items():
            if key not in FIXED_KEYS and key not in ("params", "names"):
                earlier = restored.setdefault(key, value)
                if earlier is not value and as_numbers(earlier) != as_numbers(value):
                    raise ValueError(f"param group {i} would get {key}={earlier!r} and {value!r}: {keep}")
    return saved_group(restored)
