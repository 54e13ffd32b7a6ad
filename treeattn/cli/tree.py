"""``treeattn tree``: pack beams of draft tokens into a prefix tree, and draw it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from treeattn import files
from treeattn.errors import ArgumentError
from treeattn.token_tree import TokenTree

__all__ = ["command"]

_ARCHIVES = (".safetensors", ".npz")


@click.command("tree")
@click.argument("source", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--row", type=click.IntRange(0), default=None, help="Of the batch; all unless said, svg: 0.")
@click.option("--format", "form", type=click.Choice(["text", "svg"]), default="text", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the drawing here, not to the screen.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the packed tree here.")
def command(source: Path, row: int | None, form: str, out: Path | None, json_path: Path | None) -> None:
    """Pack the beams of FILE into a prefix tree: each prefix once, and who sees whom.

    FILE.safetensors or FILE.npz holds beams [batch, beams, tokens], or tokens and parents [batch, nodes] (-1:
    follows the context) and perhaps lengths [batch]. In any other FILE each line is a beam, of words, and an
    empty line begins another row of the batch.
    """
    write_json, write = files.output_writer(json_path), files.output_writer(out)
    files.check_distinct([json_path, out], [source])
    tree, label = (_packed(source), str) if source.suffix in _ARCHIVES else _words(source)
    rows = [row] if row is not None else range(tree.batch) if form == "text" else [0]
    draw = tree.text if form == "text" else tree.svg
    drawings = [draw(index, label) for index in rows]
    heading = form == "text" and tree.batch > 1
    drawing = "\n".join(f"row {i}\n{d}" if heading else d for i, d in zip(rows, drawings, strict=True))
    write_json((json.dumps(_facts(tree)) + "\n").encode())
    write(drawing.encode())
    tokens = int((tree.unpack_map >= 0).sum())
    print(drawing if out is None else f"the drawing is in {out}")
    print(f"{tokens} tokens given, {int(tree.lengths.sum())} nodes kept")


def _packed(source: Path) -> TokenTree:
    tensors = _npz(source) if source.suffix == ".npz" else files.open_cache(source).tensors
    if "beams" in tensors:
        return TokenTree.from_beams(tensors["beams"])
    if "tokens" not in tensors or "parents" not in tensors:
        held = ", ".join(sorted(tensors)) or "none"
        raise ArgumentError(f"{source}: needs beams, or tokens and parents; it holds {held}")
    return TokenTree.from_parents(tensors["tokens"], tensors["parents"], tensors.get("lengths"))


def _npz(source: Path) -> dict[str, Any]:
    try:
        with np.load(source, allow_pickle=False) as archive:
            return dict(archive)
    except Exception as error:  # zipfile, zlib and NumPy have many types for what a file can be
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ArgumentError(f"{source}: not a readable npz file ({reason})") from None


def _words(source: Path) -> tuple[TokenTree, Callable[[int], str]]:
    """A tree of the words in a text, numbered as they appear, and the words of its tokens."""
    try:
        blocks = source.read_text().strip().split("\n\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text"
        raise ArgumentError(f"{source}: cannot be read ({reason})") from None
    beams = [[line.split() for line in block.splitlines() if line.strip()] for block in blocks]
    words = list(dict.fromkeys(word for row in beams for beam in row for word in beam))
    if not words:
        raise ArgumentError(f"{source}: no beams; each line is one, of words")
    ids = {word: number for number, word in enumerate(words)}
    tree = TokenTree.from_paths([[[ids[word] for word in beam] for beam in row] for row in beams])
    return tree, words.__getitem__


def _facts(tree: TokenTree) -> dict[str, Any]:
    names = ("tokens", "parents", "lengths", "depths", "origin", "unpack_map")
    facts = {name: getattr(tree, name).tolist() for name in names}
    return {"batch": tree.batch, "nodes": tree.nodes, **facts, "mask_words": tree.mask_words().tolist()}
