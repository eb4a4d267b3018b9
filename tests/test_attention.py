"""Attention backends against the definition, and how one is chosen. test_gpt.py checks what the model
calls.
"""

import inspect
import re

import pytest
import torch
import torch.nn.attention.varlen

from nanomuon import attention as module
from nanomuon.attention import (
    WHOLE_SCORES,
    attention,
    fastest,
    flash_implementations,
    measure,
    plain_attention,
    sdpa,
    use,
    whole_scores,
)

CPU = torch.device("cpu")
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.setattr(module, "_chosen", {})


def tensors(B=2, T=48, H=4, Hkv=2, D=16):
    torch.manual_seed(0)
    return [torch.randn(B, T, heads, D) for heads in (H, Hkv, Hkv)]


def definition(q, k, v, window=None):
    """One query and one head at a time."""
    out = torch.empty_like(q)
    for i in range(q.size(1)):
        seen = slice(0 if window is None else max(0, i - window + 1), i + 1)
        for h in range(q.size(2)):
            kv = h * k.size(2) // q.size(2)
            weights = torch.softmax((k[:, seen, kv] @ q[:, i, h, :, None])[..., 0] / q.size(3) ** 0.5, -1)
            out[:, i, h] = (weights[..., None] * v[:, seen, kv]).sum(1)
    return out


@pytest.mark.parametrize("window", [None, 1, 10])
@pytest.mark.parametrize("backend", [sdpa, whole_scores, plain_attention])
def test_backends_of_the_cpu_are_the_definition(backend, window):
    q, k, v = tensors()
    torch.testing.assert_close(backend(q, k, v, window), definition(q, k, v, window), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_gradients_of_whole_scores_are_those_of_the_definition(window):
    inputs = [x.double().requires_grad_() for x in tensors(B=1, T=12, D=4)]
    assert torch.autograd.gradcheck(lambda q, k, v: whole_scores(q, k, v, window), inputs)
    q, k, v = (x.detach()[:, :, :2].flatten(0, 1).contiguous().requires_grad_() for x in inputs)
    torch.library.opcheck(module.attend, (q, k, v, window or 12))


def test_a_cpu_in_bf16_takes_whole_scores_where_they_are_small_and_few(monkeypatch):
    asked = []
    for backend in (sdpa, whole_scores):
        monkeypatch.setattr(
            module, backend.__name__, lambda q, k, v, window, name=backend.__name__: asked.append(name)
        )
    short, long = ([x.bfloat16() for x in tensors(B=1, T=T)] for T in (WHOLE_SCORES, WHOLE_SCORES + 1))
    attention(*short, normalized=True)
    attention(*long, normalized=True)
    attention(*short)  # large scores would lose digits
    attention(*[x.float() for x in short], normalized=True)
    attention(short[0][:, -1:], *short[1:], normalized=True)  # decoding
    assert asked == ["whole_scores", "sdpa", "sdpa", "sdpa", "sdpa"]


# What attention.py calls of PyTorch, as each version has it
FLEX = (
    "query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False, "
    "kernel_options=None, *, return_aux=None"
)
BLOCK_MASK = f"mask_mod, B, H, Q_LEN, KV_LEN, device=None, BLOCK_SIZE={2**7}, _compile=False"
VARLEN = (
    "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, "
    "return_aux=None, scale=None, window_size=(-1, -1)"
)
SAME_IN_ALL = {
    "scaled_dot_product_attention": (
        "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False"
    ),
    "flex_attention": FLEX,
    "create_block_mask": BLOCK_MASK,
    "activate_flash_attention_impl": "impl",
    "list_flash_attention_impls": "",
    "current_flash_attention_impl": "",
    "restore_flash_attention_impl": "_raise_warn=True",
}
WITH_GROUPS = f"{VARLEN}, enable_gqa=False, seqused_k=None, block_table=None, num_splits=None"
SIGNATURES = {
    "2.11": {**SAME_IN_ALL, "varlen_attn": VARLEN},
    "2.12": {**SAME_IN_ALL, "varlen_attn": WITH_GROUPS},
    "2.13": {
        **SAME_IN_ALL,
        "varlen_attn": WITH_GROUPS,
        "create_block_mask": (
            f"{BLOCK_MASK}, separate_full_blocks=True, compute_dq_write_order=False, dq_kv_order=True"
        ),
    },
}


def signature(parameters):
    return inspect.signature(eval(f"(lambda {parameters}: None)"))


def installed_signature(name):
    if name == "scaled_dot_product_attention":  # written in C++
        described = torch.nn.functional.scaled_dot_product_attention.__doc__
        return signature(re.search(rf"{name}\((.*?)\) ->", described, re.DOTALL).group(1))
    if name == "varlen_attn":
        place = torch.nn.attention.varlen
    elif name in ("flex_attention", "create_block_mask"):
        place = module.flex_module
    else:
        place = torch.nn.attention
    parameters = inspect.signature(getattr(place, name)).parameters.values()
    return inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters])


@pytest.mark.parametrize("name", SIGNATURES["2.13"])
def test_pytorch_has_the_signatures_that_are_written_down(name):
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in SIGNATURES:
        pytest.skip(f"the table has no row for PyTorch {version}")
    assert installed_signature(name) == signature(SIGNATURES[version][name])


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("version", SIGNATURES)
def test_varlen_asks_for_the_rows_and_keys_that_count(monkeypatch, version, window):
    """The kernel needs a GPU: in its place stands its documented meaning, (left, right) keys around the
    query's own, with the arguments that each version takes.
    """
    arguments = signature(SIGNATURES[version]["varlen_attn"])

    def varlen_attn(*args, **keywords):
        bound = arguments.bind(*args, **keywords)
        bound.apply_defaults()
        q, k, v, ends, ends_k, longest, longest_k = bound.args
        window_size = bound.kwargs["window_size"]
        assert torch.equal(ends, ends_k) and longest == longest_k and ends.dtype == torch.int32
        assert bound.kwargs.get("enable_gqa", False) == (q.size(1) != k.size(1)) and window_size[1] == 0
        visible = None if window_size[0] == -1 else window_size[0] + 1
        bounds = ends.tolist()
        assert max(b - a for a, b in zip(bounds, bounds[1:], strict=False)) == longest
        rows = [
            definition(q[None, a:b], k[None, a:b], v[None, a:b], visible)[0]
            for a, b in zip(bounds, bounds[1:], strict=False)
        ]
        return torch.cat(rows)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(module, "_VARLEN_TAKES_GROUPS", "enable_gqa" in arguments.parameters)
    q, k, v = tensors()
    torch.testing.assert_close(module.varlen(q, k, v, window), definition(q, k, v, window))


def test_what_is_installed_says_whether_varlen_takes_groups():
    parameters = inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters
    assert module._VARLEN_TAKES_GROUPS == ("enable_gqa" in parameters)


@pytest.mark.slow
def test_flex_compiled_into_a_graph_is_the_definition():
    q, k, v = tensors()
    module.make_block_mask(48, 10, CPU)
    module._chosen[module._key(q, k, 10)] = module.flex
    compiled = torch.compile(attention, dynamic=False, fullgraph=True)
    with torch.no_grad():  # on CPUs it has no backward pass
        torch.testing.assert_close(compiled(q, k, v, 10), definition(q, k, v, 10), rtol=1e-4, atol=1e-5)


@on_cuda
@pytest.mark.parametrize("window", [None, 1, 100, 128])
@pytest.mark.parametrize("implementation", flash_implementations(torch.device("cuda")))
def test_backends_of_the_gpu_are_the_definition(implementation, window):
    q, k, v = (x.cuda().bfloat16() for x in tensors(T=256, D=64))
    expected = plain_attention(q, k, v, window)
    module.use_flash_implementation(implementation)
    try:
        module.make_block_mask(256, window, q.device)
        for backend in (sdpa, module.varlen, module.flex):
            torch.testing.assert_close(backend(q, k, v, window), expected, rtol=3e-2, atol=3e-2)
    finally:
        module.use_flash_implementation(None)


@on_cuda
def test_the_gpu_has_a_windowed_kernel():
    _, best = fastest(measure(2, 512, 4, 2, 64, [None, 128], torch.device("cuda"), torch.bfloat16, True))
    assert best[128][1] != "sdpa", "masked products for a window"


def test_measure_times_what_is_right_and_names_what_is_not(monkeypatch):
    right = measure(2, 48, 4, 2, 16, [None, 10], CPU, torch.float32, False, rounds=1)
    assert right.keys() == {None} and right[None].keys() == {None, 10}
    assert all(row["sdpa"] > 0 for row in right[None].values())

    def one_key_too_many(q, k, v, window):
        return plain_attention(q, k, v, window and window + 1)

    def broken(q, k, v, window):
        raise NotImplementedError("no such kernel\nhere")

    def refused(q, k, v, window):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    def nan_in_one_gradient(q, k, v, window):
        zero = (q - q.detach()).abs().sqrt()  # whose slope is none
        return plain_attention(q, k, v, window) + zero

    def out_of_date(q, k, v, window):
        return sdpa(q, k, v, window, enable_gqa=True)

    for backend, complaint, is_expected in (
        (one_key_too_many, "wrong: off by", False),
        (nan_in_one_gradient, "wrong: off by nan", False),
        (broken, "not supported here: NotImplementedError: no such kernel", True),
        (refused, "not supported here: RuntimeError: FlashAttention only supports Ampere", True),
        (out_of_date, "failed: TypeError: sdpa() got an unexpected keyword argument 'enable_gqa'", False),
    ):
        backend.__name__ = "sdpa"
        monkeypatch.setattr(module, "sdpa", backend)
        measured = measure(2, 48, 4, 2, 16, [10], CPU, torch.float32, False, rounds=1)
        found = measured[None][10]["sdpa"]
        assert found.startswith(complaint) and "\n" not in found
        named = [] if is_expected else [f"sdpa window 10: {found}"]
        assert module.unexpected(measured) == named


def test_a_flash_package_that_is_installed_and_broken_is_named(monkeypatch):
    errors = {
        "FA3": ImportError("libcudart.so.12: cannot open shared object file"),
        "FA4": ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn"),
        "FA5": None,
        "FA6": ModuleNotFoundError("No module named 'cutlass'", name="cutlass"),
    }

    def activate(name):
        if errors[name] is not None:
            raise errors[name]

    monkeypatch.setattr(torch.nn.attention, "list_flash_attention_impls", lambda: list(errors))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    cuda = torch.device("cuda")
    broken = "failed: ImportError: libcudart.so.12: cannot open shared object file"
    packages = module.flash_packages(cuda)
    assert packages["FA3"] == broken and packages["FA5"] is None and "cutlass" in packages["FA6"]
    assert packages.keys() == {"FA3", "FA5", "FA6"}
    assert flash_implementations(cuda) == [None, "FA5"] and flash_implementations(CPU) == [None]

    monkeypatch.setattr(module, "flash_packages", lambda device: {"FA3": broken})
    measured = measure(2, 48, 4, 2, 16, [None, 10], CPU, torch.float32, False, rounds=1)
    lines = [f"varlen FA3 full: {broken}", f"varlen FA3 window 10: {broken}"]
    assert module.unexpected(measured) == lines
    assert fastest(measured)[0] is None and fastest(measured)[1].keys() == {None, 10}


def test_long_rows_are_checked_where_the_definition_has_room(monkeypatch):
    seen = []

    def definition(q, k, v, window):
        seen.append((q.size(1), window))
        return plain_attention(q, k, v, window)

    monkeypatch.setattr(module, "CHECKED", 16)
    monkeypatch.setattr(module, "plain_attention", definition)
    row = measure(2, 64, 4, 2, 16, [None, 20], CPU, torch.float32, False, rounds=1)[None]
    assert seen == [(16, None), (16, 5)] and all(row[window]["sdpa"] > 0 for window in (None, 20))


def test_the_fastest_is_chosen_for_its_shape_and_switch(monkeypatch):
    table = {
        None: {
            None: dict(sdpa=2.0, varlen=3.0, flex=9.0),
            10: dict(sdpa=4.0, varlen=1.5, flex="wrong: off by 1"),
        },
        "FA3": {None: dict(sdpa=1.0, varlen=3.0), 10: dict(sdpa=4.0, varlen=1.4)},
        "FA4": {None: dict(sdpa="RuntimeError", varlen="RuntimeError"), 10: dict(sdpa=0.1, varlen=0.1)},
    }
    implementation, best = fastest(table)
    assert implementation == "FA3" and best == {None: (1.0, "sdpa"), 10: (1.4, "varlen")}
    assert fastest({None: {None: dict(sdpa="RuntimeError"), 10: dict(sdpa=1.0)}}) == (None, {})
    switched = []
    monkeypatch.setattr(module, "use_flash_implementation", switched.append)
    monkeypatch.setattr(module, "varlen", lambda q, k, v, window: ("varlen", window))
    use(48, 4, 2, 16, "FA3", {None: "sdpa", 10: "varlen"}, CPU, torch.float32)
    assert switched == ["FA3"]
    q, k, v = tensors()
    assert attention(q, k, v, 10) == ("varlen", 10)
    assert torch.equal(attention(q, k, v), sdpa(q, k, v, None))
    assert torch.equal(attention(q, k, v, 48), sdpa(q, k, v, None))  # hides nothing
    for other in (tensors(T=47), [x.double() for x in (q, k, v)], [q[:, -1:], k, v]):  # what was not measured
        assert torch.equal(attention(*other, 10), sdpa(*other, 10))
