"""``treeattn check-partials``: why the partial results of several ranks do not add up."""

from __future__ import annotations

from pathlib import Path

import click

from treeattn import files
from treeattn.cli.options import FILE, Output, output_options
from treeattn.report import Report
from treeattn.study.partials import check_partials


@click.command("check-partials")
@click.argument("parts", metavar="FILES..", nargs=-1, required=True, type=FILE)
@click.option("--whole", type=FILE, help="What was made of the parts: out and perhaps lse.")
@click.option("--base", type=click.Choice(["e", "2"]), default="e",
              help="Of lse, as it is believed to be; FlashInfer writes base 2.")  # fmt: skip
@output_options(json="Write the findings.")
def command(parts: tuple[Path, ...], whole: Path | None, base: str, output: Output) -> int:
    """Find out why the partial results of several ranks do not add up. Needs no MPI.

    FILES: a dump of each rank, .safetensors or .npz: out [.., head_dim], lse [..]. Exit code 1: a fault.
    """
    output.open(*parts, whole)
    dumps = [files.open_arrays(path) for path in parts]
    findings = check_partials(dumps, None if whole is None else files.open_arrays(whole), base=base)
    made = Report({"files": list(map(str, parts)), "base": base, "findings": [f._asdict() for f in findings]})
    for finding in findings:
        made.text(f"{'fault' if finding.fault else 'note'}: {finding.kind}: {finding.text}")
    fault = any(finding.fault for finding in findings)
    if not fault:
        whole_too = ": with --whole FILE a wrong merge is found, too" if whole is None else " and the whole"
        made.text(f"no fault in {len(parts)} parts{whole_too}")
    output.report(made)
    return int(fault)
