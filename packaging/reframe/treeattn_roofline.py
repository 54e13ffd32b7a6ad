"""ReFrame: a decoding step reads the cache as fast as memory allows, by treeattn's own measure.

    reframe -C SITE.py -c packaging/reframe/treeattn_roofline.py -r

`treeattn roofline` measures the read rate of a core in the same loop as the attention. That rate is the
reference, so that no table of machines has to be kept: a step over one query head per KV head must reach most
of it.
"""

import json
from pathlib import Path

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import run_before, sanity_function, variable

DTYPES = ("float32", "bfloat16", "float16")


@rfm.simple_test
class TreeattnRoofline(rfm.RunOnlyRegressionTest):
    """One core, a query over 8 KV heads of 128 in each type, against the read rate of that core."""

    descr = "decoding steps of treeattn against the read rate of one core"
    valid_systems = ["*"]  # noqa: RUF012 (ReFrame wants lists)
    valid_prog_environs = ["*"]  # noqa: RUF012
    executable = "treeattn"
    tokens = variable(int, value=65536)
    #: How far below the read rate a step may stay, as a part of it.
    slack = variable(float, value=0.25)
    num_tasks = 1
    exclusive_access = True
    time_limit = "10m"

    @run_before("run")
    def ask_for_one_group(self):
        self.executable_opts = ["roofline", f"--tokens={self.tokens}", "--groups=1", "--json=roofline.json"]
        self.keep_files = ["roofline.json"]

    @sanity_function
    def every_type_was_measured(self):
        return sn.all(sn.assert_found(rf"^{dtype} +1 ", self.stdout) for dtype in DTYPES)

    @run_before("performance")
    def the_read_rate_is_the_reference(self):
        measured = json.loads(Path(self.stagedir, "roofline.json").read_text())
        rate = measured["read_rate_gb_s"]
        self.perf_variables = {
            row["dtype"]: sn.make_performance_function(sn.defer(row["gb_s"]), "GB/s")
            for row in measured["rows"]
        }
        self.reference = {"*": dict.fromkeys(self.perf_variables, (rate, -self.slack, None, "GB/s"))}
