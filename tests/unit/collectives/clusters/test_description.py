"""Cluster files: the shipped ones, and what is said of bad ones."""

import pytest

from tests.support.refusals import refused
from treeattn.collectives.clusters import description
from treeattn.errors import ArgumentError

GOOD = """
name = "made"
about = "two tiers"
node = "node"
cards = 2
executor = "program"
[[tiers]]
name = "node"
joins = 4
latency = 1.0
overhead = 0.1
gap = 0.0
bandwidth = 10.0
[[tiers]]
name = "net"
joins = 3
latency = 5.0
overhead = 0.5
gap = 0.2
bandwidth = 5.0
protocols = [
    { name = "eager", from_bytes = 100, latency = 6.0 },
    { name = "long", from_bytes = 1000, latency = 9.0, bandwidth = 8.0, waits = true },
]
[executors.program]
call = 1.0
round = 0.1
merge_bandwidth = 10.0
"""


def load(tmp_path, text):
    path = tmp_path / "made.toml"
    path.write_text(text)
    return description.load(path)


def test_what_is_shipped():
    wanted = {"dgx-h100", "mi300x", "dual-4090", "frontier", "leonardo", "leonardo-booster", "lumi", "laptop"}
    assert wanted <= set(description.shipped())
    for name in description.shipped():
        cluster = description.load(name)
        assert cluster.name == name
        assert cluster.executor in cluster.executors


def test_tiers_and_links(tmp_path):
    cluster = load(tmp_path, GOOD)
    assert (cluster.places, cluster.slots, cluster.widths) == (12, 4, (4, 12))
    assert (cluster.tier_between(0, 3), cluster.tier_between(3, 4)) == (0, 1)
    assert cluster.link(1, 99).latency == 5.0
    assert cluster.link(1, 100).latency == 6.0
    assert cluster.link(1, 1000) == description.Link(9.0, 0.5, 0.2, 1e-3 / 8.0, True, "protocols")


BAD = {
    "latency = 5.0": ("latency = -5.0", "tiers[1].latency", ">= 0"),
    "overhead = 0.5": ("overhead = inf", "tiers[1].overhead", "<= "),
    "bandwidth = 5.0": ("bandwidth = 0.0", "tiers[1].bandwidth", ">= "),
    "bandwidth = 5.0\n": ("bandwidth = 1e-300\n", "tiers[1].bandwidth", ">= "),  # 300 digits
    "gap = 0.2": ("gap = 0.2\ntaper = 1e300", "tiers[1].taper", "<= "),
    "gap = 0.2\n": ("", "tiers[1]", "missing required field `gap`"),
    "joins = 3": ("joins = 0", "tiers[1].joins", ">= 1"),
    "joins = 4": ('joins = "four"', "tiers[0].joins", "Expected `int`"),
    'node = "node"': ('node = "rack"', "node", "take one of node, net"),
    "cards = 2": ("cards = 3", "cards", "take a divisor"),
    'executor = "program"': ('executor = "nccl"', "executor", "take one of program"),
    "[executors.program]": ("[executors.compiled]", "compiled", "name those of slots, program, mpi, nccl"),
    "call = 1.0": ('call = 1.0\nwithin = "rack"', "executors.program.within", "take one of node, net"),
    "round = 0.1": ('round = 0.1\nassumed = ["merge"]', "assumed", "no key beside it is 'merge'"),
    'name = "net"': ('name = "node"', "tiers", "rename one"),
    "from_bytes = 1000": ("from_bytes = 10", "protocols", "sort them"),
    'about = "two tiers"': ("about = ", "not TOML", ""),
    'about = "two tiers"\n': ('about = "\\u001b[31mred"\n', "about", "no line of text"),
    "[executors.program]\ncall": ("[executors.program]\ncalls = 1\ncall", "executors", "unknown"),
}


@pytest.mark.parametrize("line", BAD)
def test_bad_files_name_the_file_the_key_and_the_remedy(tmp_path, line):
    replacement, key, remedy = BAD[line]
    assert line in GOOD
    with refused("made.toml", key, remedy):
        load(tmp_path, GOOD.replace(line, replacement))


def test_a_missing_tier(tmp_path):
    with pytest.raises(ArgumentError, match="tiers"):
        load(tmp_path, GOOD[: GOOD.index("[[tiers]]")] + GOOD[GOOD.index("[executors") :])


def test_no_such_cluster(tmp_path):
    with pytest.raises(ArgumentError, match="no such cluster; take one of cpu-hdr200, dgx-h100"):
        description.load("summit")
    with pytest.raises(ArgumentError, match="cannot be read"):
        description.load(tmp_path / "none.toml")
