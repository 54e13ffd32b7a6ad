"""Coverage-guided fuzzing of one kind of input, by atheris: ``python -m tests.fuzz.guided KIND SECONDS``.

Goes on with the corpus of the runs before, in build/fuzz. An input that is neither read nor refused in a
line is written there, and ends the run.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["treeattn", "gguf"]):
    import gguf  # noqa: F401

    from tests.fuzz.inputs import INPUTS, ROOT
    from tests.fuzz.test_inputs import assert_read_or_refused


def main() -> None:
    name, seconds = sys.argv[1:]
    kind, corpus = INPUTS[name], ROOT / "build" / "fuzz" / name
    corpus.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="treeattn-fuzz-"))
    seeds = kind.seeds(folder)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    path = folder / kind.name

    def read(data: bytes) -> None:
        path.write_bytes(data)
        assert_read_or_refused(kind.read, path)

    def damage(data: bytes, most: int, seed: int) -> bytes:
        draw = random.Random(seed)
        changed = atheris.Mutate(data, most) if draw.random() < 0.3 else kind.damage(data, draw)
        return bytes(changed)[:most]

    options = [f"-max_total_time={seconds}", f"-max_len={2 * max(map(len, seeds)) + 9999}"]
    options += [
        "-rss_limit_mb=4096",
        "-timeout=30",
        f"-artifact_prefix={corpus.parent}/{name}-",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], str(corpus), *options], read, custom_mutator=damage)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
