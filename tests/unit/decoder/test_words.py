"""What is said in the words of other libraries is taken, or told in ours."""

import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import treeattn
from treeattn.decoder.reducers import selected
from treeattn.decoder.request import Reduction
from treeattn.mpi import library

Q, K = np.zeros((1, 1, 16, 128), np.float32), np.zeros((1, 64, 4, 128), np.float32)
PLAN = {"heads": 16, "kv_heads": 4, "head_dim": 128}


class TorchType:
    """As torch's types say their names; NumPy cannot read it."""

    def __repr__(self) -> str:
        return "torch.bfloat16"


@pytest.mark.parametrize("dtype", [TorchType(), ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), "bfloat16"])
def test_types_are_names_or_objects(dtype):
    device = SimpleNamespace(type="cpu", index=None)  # as torch.device has them
    with treeattn.Decoder(**PLAN, dtype=dtype, device=device) as decoder:
        assert decoder.shape.dtype == "bfloat16"
    assert treeattn.CacheFormat(dtype=dtype).dtype == treeattn.Shard(K, K, dtype=dtype).dtype == "bfloat16"
    assert treeattn.decode(Q, K, K, device=device)[0].shape == Q.shape
    with treeattn.Merger(lse_shape=(2,), head_dim=8, dtype=dtype) as merger:
        assert merger.parts.dtype == "bfloat16"


def test_numbers_and_words_of_numpy_are_taken_for_what_they_are(tmp_path):
    """Products of theirs overflow, and no JSON takes them."""
    plan = {name: np.uint8(value) for name, value in PLAN.items()}
    with treeattn.Prefill(tokens=np.uint8(64), **plan, dtype="float32") as prefill:
        assert prefill(np.repeat(Q, 64, 1), K, K)[0].shape == (1, 64, 16, 128)
    with treeattn.Merger(lse_shape=(np.uint8(64), np.uint8(16)), head_dim=np.uint8(8)) as merger:
        assert merger(np.zeros((64, 16, 8), "f"), np.zeros((64, 16), "f"))[0].shape == (64, 16, 8)
    how = {"kv_heads": plan["kv_heads"], "head_dim": plan["head_dim"], "layout": np.str_("interleaved")}
    treeattn.ShardedCache(capacity=np.uint8(64), **how).save(tmp_path)
    assert treeattn.ShardedCache.load(tmp_path).k.shape == (1, 64, 4, 128)


@pytest.mark.parametrize(
    ("q", "k", "which"), [("swap", "swap", "q and k"), ("swap", "keep", "q"), ("keep", "swap", "k")]
)
def test_the_layout_of_torch_is_named(q, k, which):
    q, k = (one.swapaxes(1, 2) if how == "swap" else one for one, how in ((Q, q), (K, k)))
    with pytest.raises(treeattn.ArgumentError, match=rf"looks like .*: transpose\(1, 2\) of {which}$"):
        treeattn.decode(q, k, k)
    decoder = treeattn.Decoder(**PLAN, dtype="float32")
    with decoder, pytest.raises(treeattn.ArgumentError, match=r"this looks like .*: transpose\(1, 2\)$"):
        decoder(q, k, k)


@pytest.mark.parametrize(
    ("call", "word", "meant"),
    [
        (treeattn.decode, "softmax_scale", "scale="),
        (treeattn.decode, "causal", r"rules=treeattn.Rules\(causal=..\)"),
        (treeattn.decode, "positions", r"treeattn.Shard\(k, v, positions=..\)"),
        (treeattn.decode, "length", "lengths="),
        (treeattn.Decoder, "num_heads", "heads="),
        (treeattn.merge, "group", "comm="),
    ],
)
def test_an_unknown_keyword_argument_tells_which_is_meant(call, word, meant):
    with pytest.raises(TypeError, match=f"{call.__name__} has no argument '{word}': did you mean {meant}"):
        call(**{word: 1})


def test_a_default_was_not_asked_for():
    with (
        treeattn.Decoder(**PLAN) as decoder,
        pytest.raises(treeattn.ArgumentError, match="unless named") as told,
    ):
        decoder(Q, K, K)
    assert "asked for" not in str(told.value)


def test_a_decoder_says_what_it_is():
    with treeattn.Decoder(**PLAN, scheme="chain") as decoder:
        held = decoder.records.nbytes + decoder.out.nbytes + decoder.lse.nbytes
        assert repr(decoder) == f"<Decoder: chain, rank 0 of 1, {held:,} bytes held>"
        said = repr(decoder)
    assert repr(decoder) == said  # closed


@pytest.mark.parametrize("queries", [1, 2])
def test_a_closed_decoder_says_so(queries):
    with treeattn.Decoder(**PLAN, queries=queries, scheme="chain") as decoder:
        pass
    with pytest.raises(treeattn.StateError, match="chain: a step on a reducer that is closed"):
        decoder(Q, K, K)


def test_a_missing_package_is_an_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match="no MPI library could be loaded"):
        library.load()


ONE_NODE, TWO_NODES = ((0, 1, 2),), ((0, 1), (2,))


@pytest.mark.parametrize(
    ("nodes", "device", "scheme"),
    [
        (ONE_NODE, "cpu", "recursive_doubling"),
        (ONE_NODE, "cuda", "all_gather_merge"),
        (TWO_NODES, "cpu", "hierarchical"),
        (TWO_NODES, "cuda", "hierarchical"),
    ],
)
def test_the_nodes_and_the_device_decide(nodes, device, scheme):
    comm = SimpleNamespace(nodes=nodes)
    assert selected(Reduction(), comm, device).text == scheme
    assert selected(Reduction("chain"), comm, device).text == "chain"
