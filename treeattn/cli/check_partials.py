"""``treeattn check-partials``: why the partial results of several ranks do not add up."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from treeattn import files
from treeattn.cli.options import FILE, Output, output_options
from treeattn.report import Report
from treeattn.study.partials import check_partials


@click.command("check-partials")
@click.argument("parts", metavar="FILES..", nargs=-1, required=True, type=FILE)
@click.option("--whole", type=FILE,
              help="The result made of the parts, or the right one: out and perhaps lse.")  # fmt: skip
@click.option("--base", type=click.Choice(["e", "2"]), default="e",
              help="Of lse, as it is believed to be; FlashInfer writes base 2.")  # fmt: skip
@click.option("--scale", type=float, help="Of the scores, default 1/sqrt(head_dim).")
@output_options(wide=False, json="Write the findings.")
def command(
    parts: tuple[Path, ...], whole: Path | None, base: str, scale: float | None, output: Output
) -> int:
    """Find out why the partial results of several ranks do not add up. Needs no MPI.

    FILES: one dump per rank, in their order, .safetensors or .npz: out [.., head_dim] and lse [..]; perhaps
    merged_out and merged_lse, what the rank held afterwards; perhaps its q, k and v as `treeattn decode`
    takes them. Exit code 1: a fault was found.
    """
    output.open(*parts, whole)
    dumps = [files.open_arrays(path) for path in parts]
    merged = None if whole is None else files.open_arrays(whole)
    findings = check_partials(dumps, merged, base=base, scale=scale)
    made = Report({
        "files": list(map(str, parts)),
        "whole": whole and str(whole),
        "base": base,
        "findings": list(map(asdict, findings)),
    })  # fmt: skip
    out = dumps[0]["out"]
    made.text(f"{len(dumps)} parts, out {out.dtype} {list(out.shape)} on rank 0")
    for finding in findings:
        made.text(f"{'fault' if finding.fault else 'note'}: {finding.kind}: {finding.text}")
    judged = merged is not None or "merged_out" in dumps[0]
    fault = any(finding.fault for finding in findings)
    if not fault:
        looked = ["shapes and types", "empty shards", "shards held twice"]
        looked += ["the merged result"] if judged else []
        looked += ["q, k and v"] if all({"q", "k", "v"} <= dump.keys() for dump in dumps) else []
        made.text(f"no fault in {', '.join(looked)}")
    if not judged:
        made.text("with --whole FILE, or merged_out in the dumps, a wrong merge is told by what it made")
    output.report(made)
    return int(fault)
