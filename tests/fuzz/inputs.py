"""Every kind of input: valid examples, how they are damaged, and the reader that users meet."""

import contextlib
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from tests.fuzz import lines, mutations
from tests.support import plans
from tests.support.models import write_model
from tests.unit.study import made_results
from treeattn.cache import ShardedCache, saved
from treeattn.cli import scheme
from treeattn.collectives import build, names
from treeattn.collectives.catalog import select
from treeattn.collectives.clusters import description
from treeattn.files import open_arrays, open_cache, save_tensors
from treeattn.llama.config import read_config
from treeattn.llama.weights import Weights
from treeattn.mpi import launch
from treeattn.study.compare import rows
from treeattn.study.compare.summary import summarise

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Input:
    """`read` gets the path of a file of this name."""

    seeds: Callable[[Path], list[bytes]]
    damage: Callable[[bytes, random.Random], bytes]
    name: str
    read: Callable[[Path], Any]


def _tensors(_: Path) -> list[bytes]:
    arrays = {
        "k": np.ones((1, 3, 2, 8), np.float32),
        "v": np.ones((1, 3, 2, 8), np.float16),
        "e": np.ones((0, 2)),
    }
    return [save_tensors(arrays, {"scale": "0.5"}), save_tensors({"k": arrays["k"]}, {})]


def _cache(path: Path) -> None:
    file = open_cache(path)
    file.scale()
    for name in file.tensors:
        file[name].tobytes()


def _archive(folder: Path) -> list[bytes]:
    np.savez(folder / "a.npz", tokens=[[1, 2]], parents=[[-1, 0]])
    np.savez_compressed(folder / "b.npz", beams=[[[1, 2], [1, 3]]])
    return [(folder / "a.npz").read_bytes(), (folder / "b.npz").read_bytes()]


def _model(folder: Path) -> list[bytes]:
    write_model(folder, "old_dialect")
    write_model(folder / "other", "eos_list")
    return [(at / "config.json").read_bytes() for at in (folder, folder / "other")]


def _weights(folder: Path) -> list[bytes]:
    write_model(folder, "tied")
    return [(folder / "model.safetensors.index.json").read_bytes()]


def _schemes(_: Path) -> list[bytes]:
    return [
        *(name.encode() for name in names()),
        b"k_nomial_tree:radix=3", b"uneven_nodes:nodes=3+2",
        b"hierarchical:inner=chain:outer=(k_ary_tree:radix=2)",
    ]  # fmt: skip


def _scheme(path: Path) -> None:
    text = path.read_bytes().decode(errors="replace")
    if select(text).row.kind == "schedule":
        build(text, 5)


def _environment(_: Path) -> list[bytes]:
    known = dict.fromkeys([*sum(launch._LAUNCHERS.values(), ()), *launch._LOCAL_SIZES, "PMIX_RANK"], "1")
    return [json.dumps(known).encode(), json.dumps(dict.fromkeys(known, "4")).encode()]


def _possible(value: object) -> str:
    """As an environment can hold it: no half of a pair of surrogates."""
    return str(value).encode(errors="replace").decode()


def _launched(path: Path) -> None:
    try:
        said = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    given = {_possible(k): _possible(v) for k, v in said.items()} if isinstance(said, dict) else {}
    given = {k: v for k, v in given.items() if k and "=" not in k and "\0" not in k + v}
    with mock.patch.dict(launch.os.environ, given, clear=True):
        rank, size = launch.launched_as()
        assert rank >= 0
        assert size >= 1
        launch.local_size()
        launch.problem()


def _saved(folder: Path) -> list[bytes]:
    from treeattn.mpi import communicators

    ShardedCache(communicators.alone(), capacity=4, kv_heads=1, head_dim=8).save(folder)
    return [(folder / saved.NAME).read_bytes()]


def _load(path: Path) -> None:
    """Signed again, as who damages it on purpose does."""
    from treeattn.mpi import communicators

    with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
        path.write_bytes(msgspec.json.decode(path.read_bytes(), type=saved.Index).encode())
    ShardedCache.load(path.parent, communicators.alone())


def _gguf(folder: Path) -> list[bytes]:
    from tests.command.test_convert_gguf import write_gguf

    write_model(folder / "model", "tied", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    write_gguf(folder / "a.gguf", folder / "model")
    return [(folder / "a.gguf").read_bytes()]


def _convert(path: Path) -> None:
    from tests.command.test_convert_gguf import main

    with mock.patch.object(sys, "argv", ["convert_gguf", str(path), str(path.parent / "out")]):
        main()


def _head(data: bytes, draw: random.Random) -> bytes:
    """Of a file with megabytes of weights, what describes them."""
    return mutations.of_bytes(data[:8192], draw) + data[8192:]


def _schedules(_: Path) -> list[bytes]:
    made = [build(name, 4).to_json() for name in ("ring", "binary_tree", "head_scatter")]
    return [text.encode() for text in (*made, json.dumps({"schedule": json.loads(made[0])}))]


INPUTS = {
    "safetensors": Input(_tensors, mutations.of_safetensors, "x.safetensors", _cache),
    "npz": Input(_archive, mutations.of_bytes, "x.npz", open_arrays),
    "schedule": Input(_schedules, mutations.of_json, "x.json", scheme.from_file),
    "msccl": Input(
        lambda _: [plans.msccl_ring(3).encode(), plans.msccl_all_pairs(3).encode()],
        mutations.of_text, "x.xml", scheme.from_file,
    ),
    "cluster": Input(
        lambda _: [path.read_bytes() for path in (ROOT / "collectives/clusters").glob("*.toml")],
        mutations.of_text, "x.toml", description.load,
    ),
    "results": Input(
        lambda at: [made_results.write(at / "made.jsonl", made_results.keys(tokens=[64]), 1).read_bytes()],
        mutations.of_json_lines, "x.jsonl", lambda path: summarise(rows.read(path)),
    ),
    "scheme": Input(_schemes, mutations.of_text, "x", _scheme),
    "launcher": Input(_environment, mutations.of_json, "x", _launched),
    "saved_cache": Input(_saved, mutations.of_json, saved.NAME, _load),
    "model": Input(_model, mutations.of_json, "config.json", lambda path: read_config(path.parent)),
    "weights": Input(
        _weights, mutations.of_json, "model.safetensors.index.json",
        lambda path: Weights(path.parent, read_config(path.parent)),
    ),
    "line": Input(lines.seeds, mutations.of_text, "line", lines.run),
    "gguf": Input(_gguf, _head, "x.gguf", _convert),
}  # fmt: skip
