"""scripts/optim_trace.py records real steps: transfers are as it says, and its pictures are drawn."""

import json

import pytest
import torch

from nanomuon.optim import MuonAdamW
from nanomuon.runtime import InputError
from scripts import optim_trace


def traced(folder, form):
    arguments = ["--world", "2", "--depth", "1", "--vocab-size", "300", "--form", form]
    optim_trace.main([*arguments, "--out", str(folder), "--json", str(folder / "trace.json")])
    for picture in (f"optimizer_step_{form}.png", "optimizer_owners.png"):
        assert (folder / picture).stat().st_size > 5_000
    return json.loads((folder / "trace.json").read_text())[form]


def assert_whole(trace):
    """Every transfer is waited for, once it was launched, and all ranks launch the same in one order."""
    assert len(trace["ranks"]) == trace["world"] == 2
    orders = []
    for events in trace["ranks"]:
        for flight in events["transfers"]:
            assert flight["launched"] <= flight["waited_from"] <= flight["waited_to"]
        in_order = sorted(events["transfers"], key=lambda flight: flight["launched"])
        orders.append([(flight["piece"], flight["operation"]) for flight in in_order])
    assert orders[0] == orders[1]


def test_with_overlap_transfers_are_launched_in_the_backward(tmp_path):
    trace = traced(tmp_path, "overlap")
    assert_whole(trace)
    labels = [piece["label"] for piece in trace["pieces"]]
    assert len(set(labels)) == len(labels), "each has a colour of its own"
    for events in trace["ranks"]:
        flights = events["transfers"]
        backward = optim_trace.span_of(events, "backward")
        early = [flight["piece"] for flight in flights if flight["launched"] < backward["end"]]
        assert early == labels, "each piece was collected in the backward, in the order of the pieces"
        assert optim_trace.AGREEMENT == flights[len(early)]["piece"]
        for what in ("collect", "compute", "deliver"):
            made = [span["piece"] for span in events["spans"] if span["what"] == what]
            assert made == labels


def test_sharded_parameters_go_through_the_pipeline(tmp_path):
    trace = traced(tmp_path, "fsdp")
    assert_whole(trace)
    chunks = [piece["label"] for piece in trace["pieces"] if piece["muon"]]
    assert len(chunks) > 1
    for events in trace["ranks"]:
        flights = events["transfers"]
        assert {flight["piece"] for flight in flights} == {*chunks, optim_trace.AGREEMENT}
        first = [flight for flight in flights if flight["piece"] == chunks[0]]
        assert [flight["operation"] for flight in first] == ["all_to_all", "all_to_all"]
        second = next(flight for flight in flights if flight["piece"] == chunks[1])
        assert second["launched"] < first[1]["launched"], "collected before the first one was computed"


def test_owners_are_drawn_in_the_order_of_the_constructor():
    traces = {"overlap": "by the backward", "replicated": "by the groups", "fsdp": "in pieces"}
    assert list(optim_trace.owners_panels(traces).values()) == ["by the groups", "in pieces"]
    assert list(optim_trace.owners_panels({"overlap": "by the backward"}).values()) == ["by the backward"]


@pytest.mark.parametrize(
    ("names", "label"), [(["up"], "0.up: 1 of 4x8"), (["up", "down"], "0.up to 0.down\u1d40: 2 of 4x8")]
)
def test_a_bank_is_called_by_its_first_matrix_and_its_last(names, label):
    shapes = {"up": (4, 8), "down": (8, 4)}
    params = [(f"blocks.0.mlp.{name}.weight", torch.nn.Parameter(torch.ones(shapes[name]))) for name in names]
    muon = dict(kind="muon", lr=0.02, momentum=0.9, ns_steps=5, beta2=0.95, weight_decay=0.0)
    optimizer = MuonAdamW([dict(muon, params=params)])
    [bank] = optimizer.works
    assert optim_trace.label_of(bank, optimizer) == label


def test_a_world_of_one_has_nothing_to_show():
    with pytest.raises(InputError, match="--world must be at least 2"):
        optim_trace.main(["--world", "1"])
