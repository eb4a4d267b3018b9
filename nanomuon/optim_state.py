"""Where the state of an optimizer lives, and how it is saved and loaded.

A step of `optim.py` needs only the first few helpers. There each work item makes its state tensors, with
a Place for each, which says where it lives; this file saves and loads them. `full_state_dict` is whole and
goes by name, so it loads into any world and layout.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, distribute_tensor

from nanomuon.optim_groups import MUON_OPTIONS, clean_name, default_names, option_name


def named_parameters(groups):
    """(name, parameter, group) of param groups, in their order."""
    for group in groups:
        for name, param in zip(group["names"], group["params"], strict=True):
            yield name, param, group


def local(tensor):
    """This rank's part of a tensor: its piece of a DTensor, all of any other."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_cut(param):
    """Whether each rank holds only a piece. A DTensor that is whole on every rank counts as replicated."""
    if not isinstance(param, DTensor):
        return bool(getattr(param, "planned_cuts", ()))  # footprint.py plans pieces without a process group
    for axis, placement in enumerate(param.placements):
        if not placement.is_replicate() and param.device_mesh.size(axis) > 1:
            return True
    return False


def elements(param):
    """Elements of the whole parameter, the same number on every rank."""
    return math.prod(getattr(param, "planned_shape", param.shape))


def state_dtype(param):
    """float32 whatever the parameter's dtype, float64 for float64."""
    return torch.promote_types(param.dtype, torch.float32)


class Place:
    """Where one state tensor lives.

    tensor: this rank's part of it, or None. shape: of the whole. mesh, placements: how DTensor cuts the
    whole, if this rank has a piece. owner: the only rank of `world` that has it, or None; like: a tensor of
    its dtype and device. value: the tensor in optimizer.state, a DTensor if it is a piece; it shares memory
    with `tensor`.
    """

    def __init__(self, tensor, shape=None, mesh=None, placements=(), world=None, owner=None, like=None):
        self.tensor, self.value = tensor, tensor
        self.shape = tuple(tensor.shape if shape is None else shape)
        self.mesh, self.placements = mesh, tuple(placements)
        self.world, self.owner, self.like = world, owner, like
        if mesh is not None and tensor is not None:
            self.value = as_dtensor(tensor, self.shape, mesh, self.placements)

    def gathered(self):
        """A copy of the whole, on every rank. Collective."""
        if self.tensor is None:
            value = self.like.new_empty(self.shape)
        else:
            value = whole(self.value).clone(memory_format=torch.contiguous_format)
        if self.owner is not None:
            value = self.world.broadcast_from(self.owner, value).wait()
        return value

    def piece_of(self, saved):
        """This rank's part of a saved tensor: its piece if the place is cut, otherwise all of it. Collective
        if the tensor is a DTensor.
        """
        if self.mesh is None:
            return whole(saved)
        if isinstance(saved, DTensor) and saved.device_mesh == self.mesh:
            if saved.placements == self.placements:
                return saved.to_local()
        full = whole(saved)
        if self.tensor is None:
            return full
        return distribute_tensor(full, self.mesh, self.placements, src_data_rank=None).to_local()


def as_dtensor(tensor, shape, mesh, placements):
    """A DTensor of this rank's piece, in the same memory."""
    if tensor.storage_offset():
        # Make it a storage of its own: with an offset in its bank, a DTensor cannot be copied or pickled
        with torch.cuda.device_of(tensor):
            tensor = torch.from_dlpack(tensor)
    stride = torch.empty(shape, device="meta").stride()
    shape = torch.Size(shape)
    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)


def like_param(param, tensor):
    """The place of a tensor that is cut like its parameter, or whole on every rank."""
    if isinstance(param, DTensor) and is_cut(param):
        return Place(tensor, param.shape, param.device_mesh, param.placements)
    return Place(tensor)


def rows_of(param, tensor, world):
    """The place of a tensor whose rows are divided among the ranks of a world by `World.share`."""
    if world.size == 1:
        return like_param(param, tensor)
    mesh = None  # if footprint.py plans
    if world.process_group is not None:
        mesh = DeviceMesh.from_group(world.process_group, tensor.device.type)
    return Place(tensor, (len(param), *tensor.shape[1:]), mesh, [Shard(0)])


def take_over(state, param, places):
    """Put the tensors of these places into optimizer.state, with the state that it has so far: a copied
    optimizer has state, but no plan yet.
    """
    earlier = dict(state[param]) if param in state else {}
    for key, place in places.items():
        if place.tensor is not None:
            if key in earlier:
                place.tensor.copy_(place.piece_of(earlier[key]))
            state[param][key] = place.value


# ------------------------------------------------------------------------------------------------------------
# Saving


def saved_groups(optimizer):
    """The param groups without their parameters, as copies."""
    groups = []
    for group in optimizer.param_groups:
        groups.append({key: copy_of(value) for key, value in group.items() if key != "params"})
    return groups


def copy_of(value):
    """A copy of a value that could be changed in place: a learning rate that is a tensor, a list."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


def named_state_dict(optimizer):
    """state_dict() by name: {"state": {name: {key: tensor}}, "param_groups": groups without params}."""
    optimizer.plan()
    state = {}
    for name, param, _ in named_parameters(optimizer.param_groups):
        if param in optimizer.state:
            state[name] = dict(optimizer.state[param])
    return {"state": state, "param_groups": saved_groups(optimizer)}


def full_state_dict(optimizer):
    """named_state_dict() with the whole of every tensor on every rank, as copies. Collective."""
    optimizer.plan()
    state = {}
    for name, param, _ in named_parameters(optimizer.param_groups):
        if param in optimizer.places:
            state[name] = {key: place.gathered() for key, place in optimizer.places[param].items()}
    return {"state": state, "param_groups": saved_groups(optimizer)}


# ------------------------------------------------------------------------------------------------------------
# Loading


@torch.no_grad()
def load_state_dict(optimizer, state_dict, hyperparameters="restore"):
    """Restore full_state_dict(), of any world size or grouping, or what this rank's named_state_dict() or
    state_dict() returned in the same world.

    hyperparameters: "restore" takes lr, all other numbers and what schedulers have written into the groups
    from the groups in which the parameters were saved, as torch's optimizers do; "keep" keeps those of our
    groups. State keeps its dtype. ValueError, before anything is changed, names the first difference: a
    missing name or key, another shape, a piece that another rank has saved, other options.
    """
    if hyperparameters not in ("restore", "keep"):
        raise ValueError(f'hyperparameters is "restore" or "keep", not {hyperparameters!r}')
    groups = state_dict["param_groups"]
    check_form(groups, optimizer.param_groups)
    state = state_by_name(state_dict["state"], groups)
    restored = [{} for _ in optimizer.param_groups]
    if hyperparameters == "restore":
        restored = [restored_numbers(i, group, groups) for i, group in enumerate(optimizer.param_groups)]
    found = []  # (place, what was saved of it)
    if state:
        optimizer.plan()
        for name, param, _ in named_parameters(optimizer.param_groups):
            found += matched(name, optimizer.places.get(param, {}), state.get(name, {}))
    pieces = [(place, place.piece_of(saved)) for place, saved in found]
    if not state:  # saved before the first step
        for places in optimizer.places.values():
            pieces += [(place, torch.zeros(())) for place in places.values()]
    for place, piece in pieces:
        if place.tensor is not None:
            place.tensor.copy_(piece)
    for group, numbers in zip(optimizer.param_groups, restored, strict=True):
        group.update(numbers)


def check_form(saved, ours):
    """ValueError for groups of another optimizer, and for default names that would mean another parameter."""
    for i, group in enumerate(saved):
        if "kind" not in group or "names" not in group:
            raise ValueError(f"group {i} of the loaded state has no kind or names: MuonAdamW did not save it")
    theirs = [group["names"] for group in saved]
    for i, group in enumerate(ours):
        names = group["names"]
        if names and names == default_names(i, len(names)) and (i >= len(theirs) or theirs[i] != names):
            raise ValueError(
                "parameters without names load only into the same groups: give every group names=[...]"
            )


def state_by_name(state, groups):
    """{name: entry} of state by name, or by the numbers in the groups' `params`."""
    names = {}
    for group in groups:
        names |= dict(zip(group.get("params", group["names"]), group["names"], strict=True))
    return {clean_name(names.get(key, key)): entry for key, entry in state.items()}


def matched(name, places, entry):
    """(place, saved tensor) for every state tensor of a parameter in the entry."""
    found = []
    for key, place in places.items():
        if key not in entry:
            if place.tensor is None:
                continue
            raise ValueError(
                f"the loaded state has no {key} of {name}; if another rank has it, save "
                "optimizer.full_state_dict()"
            )
        saved = entry[key]
        if tuple(saved.shape) != place.shape:
            raise ValueError(f"{key} of {name} has shape {tuple(saved.shape)}, expected {place.shape}")
        if isinstance(saved, DTensor) and not is_of_this_rank(saved):
            raise ValueError(
                f"the loaded {key} of {name} is a piece that another rank has saved: save "
                "optimizer.full_state_dict()"
            )
        found.append((place, saved))
    return found


def is_of_this_rank(saved):
    """Whether a DTensor's piece is this rank's: one that is read from a file knows which rank wrote it."""
    if not dist.is_initialized():
        return False
    here = (saved.device_mesh.mesh == dist.get_rank()).nonzero().flatten()
    return here.tolist() == list(saved.device_mesh.get_coordinate() or [])


def restored_numbers(i, group, saved):
    """The values that our i-th group takes from the saved groups of its parameters: all except options."""
    restored = {}
    ours = set(group["names"])
    for source in saved:
        if ours.isdisjoint(map(clean_name, source["names"])):
            continue
        for key, value in source.items():
            if key in ("params", "names"):
                continue
            is_option = key in ("kind", "ns_steps", *MUON_OPTIONS)
            if is_option and option_name(value) != option_name(group.get(key)):
                raise ValueError(
                    f'param group {i} was saved with {key}={value!r}: load with hyperparameters="keep"'
                )
            if not is_option and restored.setdefault(key, value) != value:
                two = f"{restored[key]!r} and {value!r}"
                raise ValueError(f'param group {i} would get {key}={two}: load with hyperparameters="keep"')
    if "beta2" in restored and (restored["beta2"] is None) != (group["beta2"] is None):
        raise ValueError(f'param group {i} was saved with another beta2: load with hyperparameters="keep"')
    return {key: copy_of(value) for key, value in restored.items()}
