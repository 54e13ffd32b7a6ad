"""``treeattn check-partials``: why the partial results of several ranks do not add up."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np

from treeattn import files
from treeattn.errors import ArgumentError
from treeattn.study import environment
from treeattn.study.partials import Finding, check_partials

__all__ = ["command"]


@click.command("check-partials")
@click.argument("parts", metavar="FILES..", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--whole", type=click.Path(path_type=Path),
              help="The result made of the parts, or the right one: out and perhaps lse.")  # fmt: skip
@click.option("--base", type=click.Choice(["e", "2"]), default="e", show_default=True,
              help="Of lse, as it is believed to be; FlashInfer writes base 2.")  # fmt: skip
@click.option("--scale", type=float, default=None, help="Of the scores, default 1/sqrt(head_dim).")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the findings.")
def command(
    parts: tuple[Path, ...], whole: Path | None, base: str, scale: float | None, json_path: Path | None
) -> int:
    """Find out why the partial results of several ranks do not add up. Needs no MPI.

    FILES: one dump per rank, in their order, .safetensors or .npz: out [.., head_dim] and lse [..]; perhaps
    merged_out and merged_lse, what the rank held afterwards; perhaps its q, k and v as `treeattn decode`
    takes them. Exit code 1: a fault was found.
    """
    write_json = files.output_writer(json_path)
    files.check_distinct([json_path], [*parts, whole])
    dumps = [_dump(path) for path in parts]
    made = None if whole is None else _dump(whole)
    findings = check_partials(dumps, made, base=base, scale=scale)
    write_json(environment.as_json({
        "files": [str(path) for path in parts],
        "whole": None if whole is None else str(whole),
        "base": base,
        "findings": [asdict(finding) for finding in findings],
    }))  # fmt: skip
    _report(findings, dumps, made is not None or "merged_out" in dumps[0])
    return int(any(finding.fault for finding in findings))


def _dump(path: Path) -> dict[str, Any]:
    """The arrays of a file. Raises `ArgumentError`."""
    if path.suffix != ".npz":
        return files.open_cache(path).tensors
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # zipfile, zlib and NumPy have many types for what a file can be
        raise ArgumentError(f"{path}: not a readable .npz file ({error})") from None
    # NumPy writes bfloat16 as two bytes without a meaning.
    return {name: a.view(ml_dtypes.bfloat16) if a.dtype == "V2" else a for name, a in arrays.items()}


def _report(findings: list[Finding], dumps: list[dict[str, Any]], whole: bool) -> None:
    out = dumps[0]["out"]
    click.echo(f"{len(dumps)} parts, out {out.dtype} {list(out.shape)} on rank 0")
    for finding in findings:
        click.echo(f"{'fault' if finding.fault else 'note'}: {finding.kind}: {finding.text}")
    if not any(finding.fault for finding in findings):
        looked = ["shapes and types", "empty shards", "shards held twice"]
        looked += ["the merged result"] if whole else []
        looked += ["q, k and v"] if all({"q", "k", "v"} <= dump.keys() for dump in dumps) else []
        click.echo(f"no fault in {', '.join(looked)}")
    if not whole:
        click.echo("with --whole FILE, or merged_out in the dumps, a wrong merge is told by what it made")
