"""``treeattn tree``: pack beams of draft tokens into a prefix tree, and draw it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from treeattn import files
from treeattn.cli.options import Output, output_options
from treeattn.errors import ArgumentError
from treeattn.report import Report
from treeattn.token_tree import TokenTree


@click.command("tree")
@click.argument("source", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--row", type=click.IntRange(0), help="Of the batch; all unless said, svg: 0.")
@click.option("--format", "form", type=click.Choice(["text", "svg"]), default="text")
@output_options("Write the drawing here, not to the screen.", wide=False, json="Write the packed tree here.")
def command(source: Path, row: int | None, form: str, output: Output) -> None:
    """Pack the beams of FILE into a prefix tree: each prefix once, and which node sees which.

    FILE.safetensors or FILE.npz holds beams [batch, beams, tokens], or tokens and parents [batch, nodes] (-1:
    follows the context) and perhaps lengths [batch]. In any other FILE each line is a beam, of words, and an
    empty line begins another row of the batch.
    """
    output.open(source)
    tree, label = (_packed(source), str) if source.suffix in files.ARCHIVES else _words(source)
    rows = [row] if row is not None else range(tree.batch) if form == "text" else [0]
    draw = tree.text if form == "text" else tree.svg
    drawings = [draw(index, label) for index in rows]
    if form == "text" and tree.batch > 1:
        drawings = [f"row {index}\n{drawn}" for index, drawn in zip(rows, drawings, strict=True)]
    output.report(Report(_facts(tree)))
    output.draw("\n".join(drawings))
    tokens = int((tree.unpack_map >= 0).sum())
    gap = "" if output.out else "\n"
    print(f"{gap}{tokens} tokens given, {int(tree.lengths.sum())} nodes kept")


def _packed(source: Path) -> TokenTree:
    tensors = files.open_arrays(source)
    if "beams" in tensors:
        return TokenTree.from_beams(tensors["beams"])
    if "tokens" not in tensors or "parents" not in tensors:
        held = ", ".join(sorted(tensors)) or "none"
        raise ArgumentError(f"{source}: needs beams, or tokens and parents; it holds {held}")
    return TokenTree.from_parents(tensors["tokens"], tensors["parents"], tensors.get("lengths"))


def _words(source: Path) -> tuple[TokenTree, Callable[[int], str]]:
    """Make a tree of the words in a text, numbered as they appear, and the words of its tokens."""
    blocks = files.read_text(source).strip().split("\n\n")
    beams = [[line.split() for line in block.splitlines() if line.strip()] for block in blocks]
    words = list(dict.fromkeys(word for row in beams for beam in row for word in beam))
    if not words:
        raise ArgumentError(f"{source}: no beams; each line is one, of words")
    ids = {word: number for number, word in enumerate(words)}
    tree = TokenTree.from_paths([[[ids[word] for word in beam] for beam in row] for row in beams])
    return tree, words.__getitem__


def _facts(tree: TokenTree) -> dict[str, object]:
    names = ("tokens", "parents", "lengths", "depths", "origin", "unpack_map")
    facts = {name: getattr(tree, name).tolist() for name in names}
    return {"batch": tree.batch, "nodes": tree.nodes, **facts, "mask_words": tree.mask_words().tolist()}
