"""What of `packaging/` runs anywhere; how far the rest was tried stands in docs/on-your-cluster.md."""

import os
import re
import subprocess
import sys
from pathlib import Path

from rattler_build import Stage0Recipe

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def test_reframe_compares_with_what_roofline_measured(tmp_path):
    """With references so low that no machine is too busy to reach them."""
    recipe = ROOT / "packaging/reframe/treeattn_roofline.py"
    words = ["reframe", "--prefix", tmp_path, "-c", recipe, "-r", "-S", "tokens=4096", "-S", "slack=0.99"]
    home = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(tmp_path), "RFM_COLORIZE": "no"}
    done = subprocess.run(
        list(map(str, words)), cwd=tmp_path, capture_output=True, text=True, timeout=200,
        stdin=subprocess.DEVNULL, env={**os.environ, **home},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for dtype in ("float32", "bfloat16", "float16"):
        assert re.search(rf"^P: {dtype}: [\d.]+ GB/s \(r:[\d.]+, l:-0.99", done.stdout, re.MULTILINE)


def test_the_conda_recipe_is_one():
    (variant,) = Stage0Recipe.from_file(ROOT / "packaging/conda/recipe.yaml").render()
    assert variant.recipe.package.name == "treeattn"
