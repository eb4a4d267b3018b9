"""Record one training step of DistMuonAdamW on gloo ranks of this machine, and draw it.

    python -m scripts.optim_trace --world 4                    # three timelines and who owns what, in docs/
    python -m scripts.optim_trace --world 4 --form overlap --out . --json trace.json
    python -m scripts.optim_trace --world 3 --depth 5 --out .  # another plan: little divides

Every rank trains a small GPT on rows of its own, in three forms: `replicated` (whole parameters on every
rank, ZeRO-2), `overlap` (the same with `overlap_backward` around the backward) and `fsdp` (parameters in
pieces, FSDP2). After some steps that warm up, steps are recorded by the clock that all processes share, and
the one of median length is drawn: one lane a rank; above, what the rank computes, by piece of work; below,
thin, each transfer from its launch to the end of the wait for it. docs/optimizer.md explains the pictures.

The optimizer knows nothing of this: the script wraps the methods of its pieces of work, of `World` and of
`Transfer` from outside. FSDP2's own transfers of parameters and gradients are part of the forward and the
backward.
"""

import contextlib
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from nanomuon import optim, parallel, recipe, sharded
from nanomuon.arguments import ArgumentParser, check_sizes
from nanomuon.gpt import GPTConfig
from nanomuon.runtime import InputError, Runtime, check_output_file, check_output_folder, run_command

FORMS = {
    "replicated": "replicated (ZeRO-2): all transfers are launched in step()",
    "overlap": "replicated, with overlap_backward(): transfers start as gradients arrive",
    "fsdp": "FSDP2: AdamW where the rows are, Muon's matrices through a pipeline of chunks",
}
TRANSFERS = ("reduce_scatter", "all_gather", "all_reduce", "reduce_to", "broadcast_from", "all_to_all")
AGREEMENT = "what ranks tell each other"
OTHER = "other"  # what no piece of work launches: nothing, today
WARM_UP, RECORDED = 3, 7  # steps
ROWS, SEQ_LEN = 4, 64  # of tokens on each rank
# Muon's pieces are blue and green, AdamW's red and yellow
COLD = ("#1f5fa8", "#2a9d8f", "#6a4fb3", "#5aa9e6", "#7bb662", "#274690", "#9b8ae0", "#14746f")
WARM = ("#c8511b", "#e9a227", "#d1495b", "#8c4a2f", "#f08fa0", "#b5a300")
OF_RANKS = ("#9cc3ea", "#f6cf7f", "#9ddbc6", "#f0a6ab", "#c7b6ee", "#cfe0a0", "#d8b8a0", "#c4c9cf")
GREY, INK = "#c9cdd2", "#2b2f36"
HATCHED = dict(facecolor="white", edgecolor="#8a9099", hatch="/////")


def main(argv=None):
    parser = ArgumentParser("python -m scripts.optim_trace", __doc__)
    add = parser.add_argument
    add("--world", type=int, default=4, help="gloo ranks, each with one thread (default: %(default)s)")
    add("--depth", type=int, default=3, help="layers of the model, 64 channels each (default: %(default)s)")
    add("--vocab-size", type=int, default=4096, help="rows of the embeddings (default: %(default)s)")
    add("--form", choices=FORMS, action="append", help="only this form (default: all; may be repeated)")
    add("--out", default="docs", help="folder for the pictures (default: %(default)s)")
    add("--json", help="also write everything that was recorded to this file")
    args = parser.parse_args(argv)
    if args.world < 2:
        raise InputError(f"--world must be at least 2, not {args.world}: one process transfers nothing")
    check_sizes(args)
    check_output_folder("--out", args.out)
    if args.json is not None:
        check_output_file("--json", args.json)
    forms = args.form or FORMS
    traces = {form: recorded(form, args) for form in forms}
    for form, trace in traces.items():
        print_summary(form, trace)
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    for form, trace in traces.items():
        draw_timeline(form, trace, folder / f"optimizer_step_{form}.png")
    draw_ownership(traces, folder / "optimizer_owners.png")
    if args.json is not None:
        Path(args.json).write_text(json.dumps(traces, indent=1) + "\n")


# ------------------------------------------------------------------------------------------------------------
# Recording. All times are seconds of time.monotonic, which the processes of a machine share.


@dataclass
class Span:
    """What a rank was busy with: `forward`, `backward`, `step`, one of its rounds, or a method of a piece."""

    what: str
    piece: str
    start: float
    end: float


@dataclass
class Flight:
    """A transfer from its launch to the end of the wait for it; it may have arrived earlier."""

    operation: str
    piece: str
    bytes: int  # of the larger of what is sent and received
    launched: float
    waited_from: float = None
    waited_to: float = None


class Recorder:
    """What one rank does in one step."""

    def __init__(self):
        self.spans, self.flights = [], []
        self.pieces = [OTHER]  # whose method runs now, the innermost last

    @contextlib.contextmanager
    def span(self, what, piece=""):
        start = time.monotonic()
        try:
            yield
        finally:
            self.spans.append(Span(what, piece, start, time.monotonic()))

    def of_piece(self, method, what, piece):
        """A method of a piece of work, recorded."""

        def call(*args):
            self.pieces.append(piece)
            with self.span(what, piece):
                result = method(*args)
            self.pieces.pop()
            return result

        return call

    def launching(self, method, operation):
        """A method of World that launches a transfer, recorded."""

        def call(world, *args):
            launched = time.monotonic()
            transfer = method(world, *args)
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)] + [transfer.received]
            largest = max(tensor.nbytes for tensor in tensors)
            transfer.flight = Flight(operation, self.pieces[-1], largest, launched)
            self.flights.append(transfer.flight)
            return transfer

        return call

    def waiting(self, method):
        """Transfer.wait, recorded."""

        def call(transfer):
            transfer.flight.waited_from = time.monotonic()
            received = method(transfer)
            transfer.flight.waited_to = time.monotonic()
            return received

        return call

    @contextlib.contextmanager
    def watch(self, optimizer, labels):
        """Wrap the pieces of this optimizer, and every transfer, for the length of a step."""
        with contextlib.ExitStack() as stack:
            for work, label in labels.items():
                for what in ("collect", "compute", "deliver"):
                    method = self.of_piece(getattr(work, what), what, label)
                    stack.enter_context(mock.patch.object(work, what, method))
            for part in ("ask", "read"):
                method = self.of_piece(getattr(optimizer.agreement, part), "agree", AGREEMENT)
                stack.enter_context(mock.patch.object(optimizer.agreement, part, method))
            for operation in TRANSFERS:
                method = self.launching(getattr(optim.World, operation), operation)
                stack.enter_context(mock.patch.object(optim.World, operation, method))
            wait = self.waiting(optim.Transfer.wait)
            stack.enter_context(mock.patch.object(optim.Transfer, "wait", wait))
            # step() marks its rounds for profilers, as optimizer.collect, .compute and .deliver
            stack.enter_context(mock.patch.object(optim, "record_function", self.span))
            yield


def recorded(form, args):
    """{"world", "pieces", "owners", "ranks"} of the step of median length; its times count from the start of
    the first backward.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (form, args, folder), nprocs=args.world)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(args.world)]
    lengths = []
    for step in range(RECORDED):
        of_step = [rank["steps"][step] for rank in ranks]
        lengths.append(max(map(end_of, of_step)) - min(map(start_of, of_step)))
    median = sorted(range(RECORDED), key=lengths.__getitem__)[RECORDED // 2]
    chosen = [rank["steps"][median] for rank in ranks]
    origin = min(map(start_of, chosen))
    for events in chosen:
        shift(events, origin)
    return dict(world=args.world, pieces=ranks[0]["pieces"], owners=ranks[0]["owners"], ranks=chosen)


def span_of(events, what):
    """The one span of this name."""
    (found,) = [span for span in events["spans"] if span["what"] == what]
    return found


def start_of(events):
    return span_of(events, "backward")["start"]


def end_of(events):
    return span_of(events, "step")["end"]


def shift(events, origin):
    """Seconds of the clock become milliseconds since `origin`."""
    for event in events["spans"] + events["transfers"]:
        for key, value in event.items():
            if isinstance(value, float):
                event[key] = round(1e3 * (value - origin), 3)


def rank_main(rank, form, args, folder):
    os.environ["NANOMUON_COMPILE"] = "0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.world)
    model, optimizer = build(form, args)
    labels = {work: label_of(work, optimizer) for work in pieces_of(optimizer)}
    steps = []
    for step in range(WARM_UP + RECORDED):
        recorder = Recorder()
        with recorder.watch(optimizer, labels):
            train_step(form, model, optimizer, recorder, seed=args.world * step + rank)
        if step >= WARM_UP:
            spans = [asdict(span) for span in recorder.spans]
            steps.append(dict(spans=spans, transfers=[asdict(flight) for flight in recorder.flights]))
    in_order = pieces_of(optimizer)  # with overlap_backward it is that of the first backward
    pieces = [dict(label=labels[work], muon=is_muon(work)) for work in in_order]
    owners = [owners_of(work, labels[work], optimizer) for work in in_order]
    Path(folder, f"{rank}.json").write_text(json.dumps(dict(pieces=pieces, owners=owners, steps=steps)))
    dist.destroy_process_group()


def build(form, args):
    """The model and its optimizer, as base_train makes them."""
    # Value embeddings in every second layer, as in models of a size that needs several ranks
    config = GPTConfig.from_depth(args.depth, args.vocab_size, SEQ_LEN, value_embed_every=2)
    mesh, settings = None, {}
    if form == "fsdp":
        mesh = parallel.device_mesh("cpu", args.world, 1)
        # a matrix for each owner, so that a small model has some chunks
        settings = {"chunk_size": args.world}
    model = parallel.build_model(config, Runtime(torch.device("cpu"), torch.float32), 0, mesh, form == "fsdp")
    groups = recipe.param_groups(model, ROWS * SEQ_LEN * args.world)
    return model, optim.DistMuonAdamW(groups, **settings)


def train_step(form, model, optimizer, recorder, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (ROWS, SEQ_LEN + 1), generator=generator)
    with recorder.span("forward"):
        loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    dist.barrier()  # the lanes begin together
    overlap = optimizer.overlap_backward() if form == "overlap" else contextlib.nullcontext()
    with recorder.span("backward"), overlap:
        loss.backward()
    with recorder.span("step"):
        optimizer.step()
    optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------------------
# The plan, in words and numbers


def pieces_of(optimizer):
    """The pieces of work in their order; of the pipeline of FSDP2 its chunks."""
    pieces = []
    for work in optimizer.works:
        pieces += work.chunks if isinstance(work, sharded.Pipeline) else [work]
    return pieces


def is_muon(work):
    return isinstance(work, optim.Bank | sharded.Chunk)


def short_names(work, optimizer):
    """{parameter: its name without what all names have}."""
    names = {}
    for name, param, _ in optim.named_parameters(optimizer.param_groups):
        if param in work.places:
            names[param] = name.removesuffix(".weight").removeprefix("blocks.")
    return names


def label_of(work, optimizer):
    names = short_names(work, optimizer)
    if isinstance(work, optim.SmallParameters):
        return f"{len(names)} small AdamW parameters"
    if isinstance(work, optim.LargeParameter):
        return f"{names[work.param]} rows (AdamW)"
    m, n = work.shape
    if isinstance(work, sharded.Chunk):
        number = 1 + pieces_of(optimizer).index(work)
        return f"chunk {number}: {len(work.matrices)} of {m}x{n}"
    named = [name_of_matrix(names[matrix.param], matrix.transposed) for matrix in work.matrices]
    run = named[0] if len(named) == 1 else f"{named[0]} to {named[-1]}"  # of layers
    return f"{run}: {len(named)} of {m}x{n}"


def name_of_matrix(name, transposed):
    """Of blocks.0.mlp.down 0.down, with a T where the bank holds the transpose."""
    layer, *_, matrix = name.split(".")
    return f"{layer}.{matrix}" + ("\u1d40" if transposed else "")


def owners_of(work, label, optimizer):
    """What draw_ownership needs: who works on what, and who keeps its state."""
    names = short_names(work, optimizer)
    if isinstance(work, optim.SmallParameters):
        return dict(sort="pieces" if optim.is_cut(work.params[0]) else "small", label=label)
    if isinstance(work, optim.LargeParameter):
        rows = work.param.shape[0]
        world = optimizer.world  # FSDP2 cuts rows by the same rule
        shares = [world.share(rows, rank) for rank in range(world.size)]
        return dict(sort="rows", label=label, shape=list(work.param.shape), shares=shares)
    of = dict(label=label, owners=work.owners, names=[names[matrix.param] for matrix in work.matrices])
    of["transposed"] = [matrix.transposed for matrix in work.matrices]
    if isinstance(work, sharded.Chunk):
        return dict(of, sort="chunk")
    return dict(of, sort="bank", slots=work.slots, slot_count=work.slot_count)


def print_summary(form, trace):
    """Milliseconds of each rank in the forward, in the backward and in step(), and what that was spent on."""
    print(f"\n{FORMS[form]}")
    print("rank  forward  backward    step  computing  waiting  transfers    MB  launched in backward")
    for rank, events in enumerate(trace["ranks"]):
        length = {span["what"]: span["end"] - span["start"] for span in events["spans"]}
        flights = events["transfers"]
        waiting = sum(flight["waited_to"] - flight["waited_from"] for flight in flights)
        computing = length["step"] - waiting  # all waits are in the step
        backward_ends = span_of(events, "backward")["end"]
        early = sum(flight["launched"] < backward_ends for flight in flights)
        megabytes = sum(flight["bytes"] for flight in flights) / 1e6
        times = f"{length['forward']:8.1f} {length['backward']:9.1f} {length['step']:7.1f}"
        print(
            f"{rank:4} {times} {computing:10.1f} {waiting:8.1f} {len(flights):10} {megabytes:5.1f} {early:21}"
        )


# ------------------------------------------------------------------------------------------------------------
# Drawing


def colours_of(trace):
    """{label: colour}"""
    cold, warm, colours = 0, 0, {}
    for piece in trace["pieces"]:
        if piece["muon"]:
            colours[piece["label"]] = COLD[cold % len(COLD)]
            cold += 1
        else:
            colours[piece["label"]] = WARM[warm % len(WARM)]
            warm += 1
    colours[AGREEMENT] = INK
    if any(flight["piece"] == OTHER for events in trace["ranks"] for flight in events["transfers"]):
        colours[OTHER] = "#000000"
    return colours


def new_figure(width, height):
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no global backend, no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


BAR = 0.30  # height of what is computed, in a lane of height 1
THIN = 0.46  # height of all transfers below it


def draw_timeline(form, trace, image):
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colours, world = colours_of(trace), trace["world"]
    begin, end = shown(trace["ranks"])
    figure = new_figure(11, 1.3 + 1.45 * world)
    axis = figure.subplots()
    axis.set(xlim=(begin, end), ylim=(-0.12, world))
    for rank, events in enumerate(trace["ranks"]):
        draw_lane(axis, world - 1 - rank, events, colours)
    axis.set_yticks([world - 1 - rank + 0.62 for rank in range(world)])
    axis.set_yticklabels([f"rank {rank}" for rank in range(world)])
    axis.set_xlabel("milliseconds since the backward began", color=INK)
    axis.set_title(FORMS[form], loc="left", fontsize=12, fontweight="bold", color=INK)
    axis.tick_params(axis="y", length=0, labelsize=11)
    axis.grid(axis="x", color="#e6e6e6", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    handles = [Patch(facecolor=GREY, label="backward")]
    handles += [Patch(facecolor=colour, label=label) for label, colour in colours.items()]
    handles += [
        Patch(label="waiting for a transfer", **HATCHED),
        Line2D([], [], color=INK, linewidth=2, label="thin: transfer, launch to end of wait"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    save(figure, image)


def shown(ranks):
    """From and to when: the step, and as much of the backward, or all in which transfers are launched."""
    begins = min(span_of(events, "step")["start"] for events in ranks)
    end = max(map(end_of, ranks))
    for events in ranks:
        if any(flight["launched"] < span_of(events, "backward")["end"] for flight in events["transfers"]):
            begins = 0
    begin = max(-0.01 * end, begins - 0.4 * (end - begins))
    return begin, end + 0.01 * (end - begin)


def draw_lane(axis, lane, events, colours):
    """One rank: its rounds on top, then what it computes, then thin lines for the transfers of each piece."""
    top = lane + 0.88
    draw_bar(axis, span_of(events, "backward"), top, facecolor=GREY)
    for span in events["spans"]:
        if span["piece"]:
            draw_bar(axis, span, top, facecolor=colours[span["piece"]])
    for flight in events["transfers"]:
        draw_bar(axis, dict(start=flight["waited_from"], end=flight["waited_to"]), top, **HATCHED)
    sent = {flight["piece"] for flight in events["transfers"]}
    rows = [label for label in colours if label in sent]
    height = THIN / len(rows)
    for flight in events["transfers"]:
        y = top - BAR - 0.05 - height * (rows.index(flight["piece"]) + 1)
        length = flight["waited_to"] - flight["launched"]
        axis.broken_barh(
            [(flight["launched"], length)], (y, 0.75 * height), facecolor=colours[flight["piece"]]
        )
    mark_rounds(axis, top, events)


def mark_rounds(axis, top, events):
    """Where step() begins its rounds; named where there is room for the name."""
    rounds = [span for span in events["spans"] if span["what"].startswith("optimizer.")]
    begin, end = axis.get_xlim()
    ends = [span["start"] for span in rounds[1:]] + [end]
    for span, next_one in zip(rounds, ends, strict=True):
        axis.plot([span["start"]] * 2, [top - BAR, top + 0.04], color=INK, linewidth=0.9)
        if next_one - span["start"] > 0.05 * (end - begin):
            name = span["what"].removeprefix("optimizer.")
            axis.text(span["start"], top + 0.05, f" {name}", fontsize=8, color=INK, va="bottom")


def draw_bar(axis, span, top, edgecolor="white", **style):
    times = [(span["start"], span["end"] - span["start"])]
    axis.broken_barh(times, (top - BAR, BAR), edgecolor=edgecolor, linewidth=0.4, **style)


def owners_panels(traces):
    """{title: trace}. With overlap_backward() the pieces are in another order than the constructor's, so that
    such a trace is drawn only where there is none without.
    """
    chosen = {}
    if "replicated" in traces or "overlap" in traces:
        chosen["replicated parameters (ZeRO-2)"] = traces.get("replicated") or traces["overlap"]
    if "fsdp" in traces:
        chosen["FSDP2"] = traces["fsdp"]
    return chosen


def draw_ownership(traces, image):
    """Who works on what, and keeps its state: a panel for replicated parameters, one for FSDP2."""
    from matplotlib.patches import Patch

    chosen = owners_panels(traces)
    most = max(len(trace["owners"]) for trace in chosen.values())
    figure = new_figure(5.6 * len(chosen), 1.0 + 0.78 * most)
    figure.get_layout_engine().set(w_pad=0.15)
    panels = figure.subplots(1, len(chosen), squeeze=False)[0]
    for axis, (title, trace) in zip(panels, chosen.items(), strict=True):
        axis.set(xlim=(0, 1), ylim=(-most, 0.05))
        axis.axis("off")
        axis.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
        for i, piece in enumerate(trace["owners"]):
            axis.text(0, -i - 0.18, piece["label"], fontsize=9.5, color=INK, va="center")
            axis.text(1, -i - 0.18, KEPT[piece["sort"]], fontsize=8, color=INK, va="center", ha="right")
            DRAWN[piece["sort"]](axis, -i - 0.85, piece, trace["world"])
    world = max(trace["world"] for trace in chosen.values())
    handles = [Patch(facecolor=colour_of_rank(rank), label=f"rank {rank}") for rank in range(world)]
    handles.append(Patch(label="empty slot", **HATCHED))
    figure.legend(handles=handles, loc="outside lower center", ncols=world + 1, fontsize=9.5, frameon=False)
    save(figure, image)


TALL = 0.5  # height of a piece in the picture of the owners
KEPT = {
    "small": "every rank updates all, keeps all state",
    "pieces": "each rank updates its rows, keeps their state",
    "rows": "each rank updates its rows, keeps their state",
    "bank": "each rank updates its matrices, keeps their state",
    "chunk": "stripes: who has the rows; name: who orthogonalizes",
}


def colour_of_rank(rank):
    return OF_RANKS[rank % len(OF_RANKS)]


def draw_small(axis, y, piece, world):
    for rank in range(world):
        draw_box(axis, 0, y + TALL * (1 - (rank + 1) / world), 1, TALL / world, colour_of_rank(rank))


def draw_rows(axis, y, piece, world):
    rows = piece["shape"][0]
    for rank, (lo, hi) in enumerate(piece["shares"]):
        text = f"rows {lo} to {hi - 1}" if hi > lo else ""
        draw_box(axis, lo / rows, y, (hi - lo) / rows, TALL, colour_of_rank(rank), text)


def draw_bank(axis, y, piece, world):
    width = 1 / piece["slot_count"]
    for slot in set(range(piece["slot_count"])) - set(piece["slots"]):
        draw_box(axis, slot * width, y, width, TALL, **HATCHED)
    for slot, owner, name in zip(piece["slots"], piece["owners"], names_in_boxes(piece), strict=True):
        draw_box(axis, slot * width, y, width, TALL, colour_of_rank(owner), name)


def draw_chunk(axis, y, piece, world):
    width = 1 / max(world, len(piece["owners"]))
    for i, (owner, name) in enumerate(zip(piece["owners"], names_in_boxes(piece), strict=True)):
        for rank in range(world):
            stripe = y + TALL * (1 - (rank + 1) / world)
            draw_box(axis, i * width, stripe, 0.45 * width, TALL / world, colour_of_rank(rank))
        draw_box(axis, (i + 0.47) * width, y, 0.45 * width, TALL, colour_of_rank(owner), name)


def draw_pieces(axis, y, piece, world):
    for rank in range(world):
        draw_box(axis, rank / world, y, 1 / world, TALL, colour_of_rank(rank), "its rows of each")


DRAWN = {
    "small": draw_small,
    "pieces": draw_pieces,
    "rows": draw_rows,
    "bank": draw_bank,
    "chunk": draw_chunk,
}


def names_in_boxes(piece):
    """The names of its matrices; none where there are many."""
    if len(piece["names"]) > 16:
        return [""] * len(piece["names"])
    return [
        name_of_matrix(name, transposed)
        for name, transposed in zip(piece["names"], piece["transposed"], strict=True)
    ]


def draw_box(axis, x, y, width, height, facecolor, text="", edgecolor="white", linewidth=1, **style):
    from matplotlib.patches import Rectangle

    box = Rectangle(
        (x, y), width, height, facecolor=facecolor, edgecolor=edgecolor, linewidth=linewidth, **style
    )
    axis.add_patch(box)
    axis.text(x + width / 2, y + height / 2, text, fontsize=7.5, color=INK, ha="center", va="center")


def save(figure, image):
    """As a PNG of 128 colours, a third of the bytes."""
    from PIL import Image  # comes with matplotlib

    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(image, optimize=True)
    print(image)


if __name__ == "__main__":
    run_command(main)
